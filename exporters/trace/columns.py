"""A trace as tables: a row per request, cause, finding, life, entry, step, stay of a block, or second.

:data:`TABLES` has the columns.

Rows are produced as accounts close, so memory is bounded by open requests. ``parquet.py`` writes them to
files, ``frames.py`` makes DataFrames; both take names and types from here. Seconds count from the start of
the engine, as in an account statement. ``python -m kvledger.exporters.trace.columns`` prints
``docs/reference/tables.md``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import NamedTuple

from ...audit.ledger.account import Account
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.find import journals_at
from ...audit.replay.journals import each_batch
from ...audit.replay.observers import KeptAccounts
from ...audit.replay.windows import EVERYTHING, Window
from ..facts.hours import HOURLY
from ..facts.replayed import RowCollector, Wanted
from ..facts.rows import finding_rows
from ..facts.schema import ENGINE, ENGINES, REQUEST_ID, Column, Row, Rows, Value
from ..facts.schema import TABLES as FACT_TABLES
from .step_rows import BlockRows, StepRows

# --- Twenty-five questions with the SQL that answers each, for docs/reference/tables.md. A test runs all.


class Question(NamedTuple):
    """A question in words, and its answer as one SELECT for ``kvledger query``."""

    words: str
    sql: str


QUESTIONS = (
    Question(
        "What share of prompt tokens was hit, by model?",
        "select model, (sum(local) + sum(external)) / sum(prompt_tokens) as hit_share from requests group"
        " by model",
    ),
    Question(
        "How did the hit rate change from hour to hour?",
        "select date_trunc('hour', closed_time) as hour, sum(local) / sum(prompt_tokens) as local_share "
        "from requests group by hour order by hour",
    ),
    Question(
        "Which requests computed most tokens again?",
        "select request_id, preemptions, rework, scheduled from requests where rework > 0 order by rework"
        " desc limit 10",
    ),
    Question(
        "Why were tokens computed again?",
        "select cause, sum(tokens) as tokens, count(*) as requests from causes where figure = 'rework' "
        "group by cause order by tokens desc",
    ),
    Question(
        "Why did prompt tokens miss the caches, by hour?",
        "select date_trunc('hour', closed_time) as hour, cause, sum(tokens) as tokens from causes where "
        "figure = 'missed' group by hour, cause order by hour, tokens desc",
    ),
    Question(
        "How long do requests wait: median, 95th and 99th percentile in seconds?",
        "select quantile_disc(waited_microseconds / 1e6, [0.5, 0.95, 0.99]) as seconds from requests",
    ),
    Question(
        "How long until the first output, and what share of it were requests queued, by adapter?",
        "select lora, quantile_disc(first_token_microseconds / 1e6, 0.95) as p95_seconds, "
        "sum(queued_microseconds) / sum(first_token_microseconds) as queued_share, count(*) as requests "
        "from requests where first_token_microseconds is not null group by lora",
    ),
    Question(
        "Which tenant has most of the misses? (KVLEDGER_GROUP finds it in the request id.)",
        "select request_group, sum(missed) as missed, sum(prompt_tokens) as prompt_tokens from requests "
        "group by request_group order by missed desc nulls last",
    ),
    Question(
        "How many tokens did the connector promise and not load, and why?",
        "select cause, sum(tokens) as tokens from causes where figure = 'voided' group by cause order by "
        "tokens desc",
    ),
    Question(
        "Did asynchronous loads save more time than requests waited for them?",
        "select engines.engine, sum(load_waited_microseconds) / 1e6 as waited_seconds, "
        "sum(asynchronous_tokens) * any_value(prefill_seconds) as asynchronous_saved_seconds from "
        "requests join engines using (journal) group by engines.engine",
    ),
    Question(
        "Where does the engine report other hits than the ledger settled?",
        "select request_id, local, reported_local, external, reported_external from requests where "
        "reported_local is not null and (local, external) != (reported_local, reported_external) limit 20",
    ),
    Question(
        "What explains the difference between planned and settled tokens?",
        "select step, cause, count(*) as requests, sum(local) as local, sum(external) as external from "
        "differences group by step, cause order by requests desc",
    ),
    Question(
        "Which findings are there, and in how many requests?",
        "select id, severity, count(distinct request_id) as requests, min(time) as first from findings "
        "group by id, severity order by requests desc",
    ),
    Question(
        "What do requests with a violation have in common?",
        "select verdict, count(*) as requests, avg(preemptions) as preemptions, avg(prompt_tokens) as "
        "prompt_tokens from requests group by verdict",
    ),
    Question(
        "How long are prompts and outputs?",
        "select quantile_disc(prompt_tokens, [0.5, 0.95]) as prompt, quantile_disc(output_tokens, [0.5, "
        "0.95]) as output from requests where unknown is null",
    ),
    Question(
        "Does a longer prompt hit less?",
        "select floor(log2(greatest(prompt_tokens, 1))) as log2_tokens, sum(local) / sum(prompt_tokens) "
        "as local_share, count(*) as requests from requests where prompt_tokens > 0 group by log2_tokens "
        "order by log2_tokens",
    ),
    Question(
        "How many requests ran and waited at most, by engine?",
        "select engine, max(running) as running, max(waiting) as waiting from activity group by engine",
    ),
    Question(
        "Which share of engine time went into tokens that were computed again?",
        "select engines.engine, sum(rework) * any_value(prefill_seconds) / any_value(busy_seconds) as "
        "share from requests join engines using (journal) group by engines.engine",
    ),
    Question(
        "How do releases compare?",
        "select version, count(*) as requests, sum(rework) / sum(scheduled) as rework_share, sum(local) /"
        " sum(prompt_tokens) as local_share from requests join engines using (journal) group by version",
    ),
    Question(
        "Which requests are unknown, and why?",
        "select unknown, count(*) as requests, min(added_time) as first from requests where unknown is "
        "not null group by unknown",
    ),
    Question(
        "Which share of the blocks ran, by hour? (This and the next ones need a journal of level blocks.)",
        "select date_trunc('hour', time) as hour, sum(running_microseconds) / sum(running_microseconds + "
        "cached_microseconds + empty_microseconds + unknown_microseconds) as share from block_use group by "
        "hour order by hour",
    ),
    Question(
        "How many seconds did content stay in the cache before it was evicted?",
        "select seconds, sum(contents) as contents from (select unnest(map_keys(lifetimes)) as seconds, "
        "unnest(map_values(lifetimes)) as contents from block_use) group by seconds order by seconds",
    ),
    Question(
        "How many blocks did admissions hit, the first of a request and later ones?",
        "select resumed, count(*) as admissions, quantile_disc(hit_blocks, [0.5, 0.95]) as hit_blocks from "
        "admissions group by resumed",
    ),
    Question(
        "Which content was computed most often?",
        "select hash_id, count(*) as times from (select unnest(hash_ids) as hash_id from block_operations "
        "where operation = 'cached') group by hash_id having times > 1 order by times desc limit 10",
    ),
    Question(
        "What did each tenant use in a month, to charge it? (A request without a complete account is only "
        "counted. Each sample of a prompt is a request. With a prefill and a decode engine, take prompts "
        "from the journals of the one and outputs from those of the other.)",
        "select coalesce(request_group, salt) as tenant, model, sum(local + external) as cached, "
        "sum(computed) as computed, sum(output_tokens) as output_tokens, count(*) as requests, "
        "count(unknown) as unknown from requests where date_trunc('month', closed_time) = "
        "timestamp '2026-11-01' group by tenant, model order by tenant, model",
    ),
)


INSTANTS: dict[str, tuple[str, ...]] = {
    "lives": ("began_seconds", "ended_seconds"),
    "entries": ("seconds",),
    "steps": ("seconds",),
    "stays": ("cached_seconds", "left_seconds", "released_seconds"),
    "occupancy": ("second",),
}
"""The columns that count seconds from the engine's start. Each table ends with the same instants in UTC."""

_WITHOUT_TIMES: dict[str, tuple[Column, ...]] = {
    "lives": (
        ENGINE,
        REQUEST_ID,
        Column("life", "count", "number of the life, from 1"),
        Column("began_seconds", "seconds", "when the request was admitted"),
        Column("began_step", "count", "step of the admission"),
        Column("ended_seconds", "seconds", "when the life ended; null while it lasts"),
        Column("ended_by", "text", "finished, blocks, reset, or another cause"),
        Column("local", "count", "local hit of the admission"),
        Column("external", "count", "external tokens promised at the admission"),
        Column("loaded", "count", "promised tokens that were loaded"),
        Column("voided", "count", "promised tokens that failed or were cancelled"),
        Column("scheduled", "count", "scheduled tokens"),
        Column("rejected", "count", "rejected draft tokens"),
        Column("discarded", "count", "tokens whose KV was discarded at the end of the life"),
    ),
    "entries": (
        ENGINE,
        REQUEST_ID,
        Column("entry", "count", "number of the event in the journal"),
        Column("seconds", "seconds", "when it was posted"),
        Column("step", "count", "step of the engine"),
        Column("life", "count", "number of the life"),
        Column("text", "text", "the posting, as `kvledger show` prints it"),
        Column("debit", "count", "tokens whose KV was lost"),
        Column("credit", "count", "tokens whose KV was gained"),
        Column("balance", "count", "tokens whose KV the life has after the posting"),
    ),
    "steps": (
        ENGINE,
        Column("step", "count", "number of the first of these steps"),
        Column("seconds", "seconds", "when the step was scheduled, or when its repeats were emitted"),
        Column("times", "count", "number of equal consecutive steps in this row"),
        Column("requests", "count", "requests that each of these steps scheduled"),
        Column("tokens", "count", "tokens that each of these steps scheduled"),
        Column("drafts", "count", "draft tokens among them"),
        Column(
            "duration_seconds",
            "seconds",
            "time of these steps, and of those rows before it that have none because their steps were timed "
            "together; null if not known",
        ),
    ),
    "stays": (
        ENGINE,
        Column("pool", "count", "number of the block pool"),
        Column("block", "count", "id of the block in which the content stayed"),
        Column("request_id", "text", "the request that cached the content; null if not known"),
        Column("cached_seconds", "seconds", "when the content was cached; null: before the trace begins"),
        Column("left_seconds", "seconds", "when the content left the cache; null while it can be hit"),
        Column("left_by", "text", "evicted, reset, or dropped by the engine"),
        Column("hits", "count", "how often an admission hit the block"),
        Column("released_seconds", "seconds", "when no request held the block any more, the last time"),
        Column("idle_seconds", "seconds", "from the last release to the end of the stay"),
    ),
    "occupancy": (
        ENGINE,
        Column("second", "count", "the second; seconds without block events have no row"),
        Column("running", "count", "blocks that requests or the connector held at its end"),
        Column("cached", "count", "free blocks whose content could be hit"),
        Column("empty", "count", "free blocks without content"),
        Column("unknown", "count", "free blocks of which the trace does not say whether they have content"),
        Column("allocated", "count", "blocks allocated in this second"),
        Column("evicted", "count", "blocks whose content was evicted in this second"),
        Column("hits", "count", "blocks hit by admissions in this second"),
    ),
}


def time_name(instant: str) -> str:
    """The column of an instant in UTC."""
    return "time" if instant in ("seconds", "second") else instant.replace("_seconds", "_time")


FACTS = ("requests", "causes", "findings")
"""The tables of an export that queries know, too."""

TABLES: dict[str, tuple[Column, ...]] = {name: FACT_TABLES[name] for name in FACTS} | {
    name: (*columns, *(Column(time_name(one), "time", f"`{one}` in UTC") for one in INSTANTS[name]))
    for name, columns in _WITHOUT_TIMES.items()
}

_PLACES: dict[str, list[int]] = {
    name: [[column.name for column in columns].index(one) for one in INSTANTS[name]]
    for name, columns in _WITHOUT_TIMES.items()
}
"""By table, the places of its instants in a row."""


def rows(
    paths: Sequence[Path], wanted: Collection[str] = tuple(TABLES), window: Window = EVERYTHING
) -> Iterator[tuple[str, Rows]]:
    """Yield table names with some rows each, for the ``wanted`` tables of all journals at ``paths``.

    The ``window`` selects requests, with their lives and entries, by their end, and steps by their time.
    Raises LedgerError for a path that holds no journal.
    """
    for path in journals_at(paths):
        yield from _Trace(path, wanted, window).rows()


class _Trace:
    """The rows of one journal."""

    def __init__(self, path: Path, wanted: Collection[str], window: Window) -> None:
        self._wanted = wanted
        every_request = (lambda _: True) if "entries" in wanted else None
        self._engine_audit = EngineAudit(path, [KeptAccounts], watch=every_request, window=window)
        self._facts: list[tuple[str, Rows]] = []
        """Rows that the collector made of the last batch."""
        self._collector = RowCollector(self._engine_audit, Wanted(checks=True), self._collect)
        self._step_rows = StepRows() if "steps" in wanted else None
        """Makes the rows of steps; None: not wanted."""
        self._block_rows = BlockRows() if {"stays", "occupancy"} & set(wanted) else None
        """Makes the rows about blocks; None: not wanted."""

    def _collect(self, table: str, rows: Sequence[Row]) -> None:
        self._facts.append((table, list(rows)))

    def rows(self) -> Iterator[tuple[str, Rows]]:
        """Yield the rows of each table with the instants in UTC."""
        for name, some in self._rows():
            began = self._engine_audit.began_seconds
            began_us = None if began is None else round(began * 1e6)
            if name in FACTS:
                yield name, some
                continue
            places = _PLACES[name]
            yield name, [(*row, *(_utc(began_us, row[place]) for place in places)) for row in some]

    def _rows(self) -> Iterator[tuple[str, Rows]]:
        engine_audit = self._engine_audit
        for batch in each_batch(engine_audit):
            if self._step_rows is not None:
                yield from self._steps(self._step_rows.feed(batch.events))
            if self._block_rows is not None:
                yield from self._blocks(*self._block_rows.feed(batch.events))
            yield from self._accounts(batch.accounts)
        if self._step_rows is not None:
            yield from self._steps(self._step_rows.finish())
        if self._block_rows is not None:
            yield from self._blocks(*self._block_rows.finish())
        if "findings" in self._wanted:
            found = finding_rows(engine_audit, self._collector.journal, engine_audit.violations)
            if found:
                yield "findings", found

    def _accounts(self, accounts: list[Account]) -> Iterator[tuple[str, Rows]]:
        engine = self._engine_audit.name
        self._collector.add([], accounts)
        yield from (some for some in self._facts if some[0] in self._wanted)
        self._facts = []
        if accounts and "lives" in self._wanted:
            yield "lives", [row for account in accounts for row in _lives(engine, account)]
        if accounts and "entries" in self._wanted:
            yield "entries", [row for account in accounts for row in _entries(engine, account)]

    def _blocks(self, stays: Rows, seconds: Rows) -> Iterator[tuple[str, Rows]]:
        """The rows of stays that overlap the window, and of seconds in it."""
        engine, window = self._engine_audit.name, self._engine_audit.window
        began = self._engine_audit.began_seconds or 0.0
        if stays and "stays" in self._wanted:
            yield (
                "stays",
                [
                    (engine, *row)
                    for row in stays
                    if window.touches(began + _number(row[3], 0.0), began + _number(row[4], inf))
                ],
            )
        if seconds and "occupancy" in self._wanted:
            inside = [row for row in seconds if window.holds(began + _number(row[0], 0.0))]
            yield "occupancy", [(engine, *row) for row in inside]

    def _steps(self, steps: Rows) -> Iterator[tuple[str, Rows]]:
        """The rows of steps in the window."""
        engine_audit = self._engine_audit
        window, began = engine_audit.window, engine_audit.began_seconds or 0.0
        inside = [
            (engine_audit.name, *row)
            for row in steps
            if not window.bounded or window.holds(began + _number(row[1], 0.0))
        ]
        if inside:
            yield "steps", inside


def _lives(engine: str, account: Account) -> Iterator[tuple[Value, ...]]:
    if account.unknown is not None:
        return
    for life in account.lives:
        yield (
            engine,
            account.request_id,
            life.number,
            life.began_at / 1e6,
            life.began_step,
            _seconds(life.ended_at),
            life.ended_by or None,
            life.local,
            life.external,
            life.loaded,
            sum(life.voided.values()),
            life.scheduled,
            life.rejected,
            life.discarded,
        )


def _entries(engine: str, account: Account) -> Iterator[tuple[Value, ...]]:
    for line in account.lines or ():
        yield (
            engine,
            account.request_id,
            line.number,
            line.at / 1e6,
            line.step,
            line.life,
            line.text,
            line.debit,
            line.credit,
            line.balance,
        )


def _seconds(at: int) -> float | None:
    return at / 1e6 if at >= 0 else None


def _number(value: Value, otherwise: float) -> float:
    return value if isinstance(value, int | float) else otherwise


def _utc(began_us: int | None, seconds: Value) -> int | None:
    """Microseconds since 1970 of an instant; None if it is not known."""
    if began_us is None or not isinstance(seconds, int | float):
        return None
    return began_us + round(seconds * 1e6)


# --- the page -------------------------------------------------------------------------------------------


HEAD = """# Tables

Made by `python -m kvledger.exporters.trace.columns`; do not edit.

A request that ended is a row of `requests`; of a journal of level `blocks` each of its lives is a row of
`admissions`, and what it did with the prefix cache are rows of `block_operations`.
`kvledger query PATH "select ..."` asks {queried} in SQL (DuckDB's), also of journals that
`kvledger journals compact` keeps as Parquet. `kvledger export PATH -o DIR` writes
{exported} as Parquet, one file per table, `entries` only with `--entries`;
`kvledger.exporters.trace.frames` gives them as pandas DataFrames. `summary` and `why` group by any column of
`requests` (`--by model,hour`) and select with a condition on them (`--where "rework > 0"`); `summary
--percentiles missed` adds exact percentiles.

`hours`, `hour_causes` and `hour_differences` are sums of the rows of `requests`, `causes` and `differences`,
by the hour in which requests ended and by their labels. They have every request, also those whose rows
`kvledger journals compact --keep` has removed; what lost tokens took is their number times the prices in
`engines`.

*Text* is a string, a *count* a 64-bit integer, of tokens unless the text names another unit, and *seconds* a
double, counted from the start of the engine; a *time* is a timestamp in UTC, in microseconds. *Counts* are
a list, and a *distribution* is a map from a number to how often it was seen. A null means that the value is
unknown or does not apply.
"""


def markdown() -> str:
    """docs/reference/tables.md."""
    asked = {**FACT_TABLES, "engines": ENGINES, **{name: table.columns for name, table in HOURLY.items()}}
    every = {**asked, **TABLES}
    lines = [HEAD.format(queried=_names(asked), exported=_names(TABLES))]
    lines += ["## Twenty-five questions", ""]
    for number, question in enumerate(QUESTIONS, 1):
        lines += [f"{number}. {question.words}", "", "   ```sql", f"   {question.sql}", "   ```", ""]
    for name, columns in every.items():
        lines += [f"## {name}", "", "| column | type | meaning |", "|---|---|---|"]
        lines += [f"| `{column.name}` | {column.kind} | {column.description} |" for column in columns]
        lines.append("")
    return "\n".join(lines)


def _names(tables: Iterable[str]) -> str:
    *first, last = (f"`{name}`" for name in tables)
    return f"{', '.join(first)} and {last}"


if __name__ == "__main__":
    print(markdown(), end="")
