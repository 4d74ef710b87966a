"""The commands: each parses its options, calls one function and returns what it found.

No logic belongs here. An option stands at its command; those of several commands are in ``cli_options.py``.
Everything is imported when a command needs it, so that ``kvledger --help`` is quick and only ``demo``,
``conformance`` and ``doctor`` need vLLM. Exit codes are in ``cli_options.py`` and in the README.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import typer

from . import cli_options as opt
from .cli_options import argument, choice, option, setting
from .cli_run import (
    ALL,
    CODES,
    COMPLETE,
    JOBS,
    NONE,
    NOT_DASK,
    WINDOW,
    Reading,
    command,
    further,
    left_out_to,
)
from .cli_run import app as app
from .cli_run import main as main
from .exporters.answer import Answer

SHELLS = "bash|zsh|fish"

# --- read journals --------------------------------------------------------------------------------------


@command(
    opt.RIGHT,
    "audit /var/lib/kvledger",
    "audit /var/lib/kvledger --since 1h --format json",
    "audit journals --format github  # in a GitHub Actions step",
    "audit journals --fail-on drift",
    exit_codes=f"{opt.AUDIT_CODES}. With --fail-on drift, a drift is 1 too.",
)
def audit(
    paths: list[Path] = opt.PATHS,
    verbose: bool = opt.VERBOSE,
    format: str = choice("--format text|json|csv|github", "The output format."),
    fail_on: str = choice("--fail-on violation|drift", "What exit code 1 stands for, beside a violation."),
    read: Reading = ALL,
) -> Answer:
    """Check every account and print the verdict.

    Prints the verdict, the findings and where prompt tokens came from. As csv: one line per finding. As
    github: annotations for GitHub Actions.
    """
    from .audit.replay.journals import audit_paths
    from .audit.replay.observers import Lost, Steps
    from .exporters.reports.audit import answer, report
    from .exporters.reports.conclusions import concluded
    from .exporters.reports.costs import costs_of

    tallied = format in ("text", "json")
    priced = format == "json" or (format == "text" and verbose)  # a text without -v prints no seconds
    with read.journals(paths) as (places, window, run):
        observers = [*([Lost] if tallied else []), *([Steps] if priced else [])]
        audited = audit_paths(places, observers, window=window, run=run)
        result = concluded(report(audited, costs_of(audited.engines) if tallied else None))

    for note in result.notes if format == "csv" else ():  # csv has no place for them
        typer.echo(note, err=True)

    code = CODES["violated" if fail_on == "drift" and result.drift else result.verdict]
    return answer(result, verbose=verbose)._replace(code=code)


@command(opt.RIGHT, "show /var/lib/kvledger cmpl-4f", "show /var/lib/kvledger cmpl-4f --every")
def show(
    paths: list[Path] = opt.PATHS,
    request: str = argument("REQUEST", "A request id."),
    every: bool = option("--every", "Print each entry; do not fold repeated entries."),
    format: str = opt.TEXT,
    read: Reading = WINDOW,
) -> Answer:
    """Print the account of one request or call.

    REQUEST is any id that the client knows: the id of the response, the X-Request-Id, a trace id, or the
    engine's own. As csv: one line per entry.
    """
    from .audit.replay.journals import statements
    from .exporters.reports import statement as report

    with read.journals(paths) as (places, window, run):
        found = statements(places, request, window=window, run=run)
    if len(found) > 1:
        return report.answer_of_call(request, found)
    return report.answer(found[0], every_entry=every)


@command(
    opt.RIGHT,
    "check http://localhost:8000",
    "check http://localhost:8000 --probe --format json",
    exit_codes=(
        "Exit codes: 0 the counters agree; 1 they contradict each other; 2 bad usage, or no server "
        "of an engine answers there in time; 3 something can't be judged, and nothing contradicts."
    ),
)
def check(
    url: str = argument("URL", "The address of the server."),
    probe: bool = option(
        "--probe",
        "Also send four requests of random token ids: a prompt twice, another last token, half of it.",
    ),
    format: str = opt.TEXT_OR_JSON,
) -> Answer:
    """Check a running server from outside.

    Nothing is installed there. Reads release, models and /metrics, twice within a second: why few prompt
    tokens hit the prefix cache, which known faults this release has under the configuration that shows,
    counters that contradict each other, and what only hooks in the engine can tell. Takes less than five
    seconds, and ten with --probe.
    """
    from .exporters import served_engine
    from .exporters.reports import check as report

    result = report.checked(served_engine.ask(url, probe=probe))
    return report.answer(result)._replace(code=CODES[result.verdict])


@further(
    "check usage",
    "/var/lib/kvledger --log usage.jsonl",
    "/var/lib/kvledger --log litellm.jsonl --since 1d --format csv",
    exit_codes=(
        "Exit codes: 0 every call is equal or explained; 1 a difference is unexplained; 2 bad usage or "
        "input; 3 a call is not in the trace, its account is incomplete, or the log tells of no call."
    ),
)
def usage(
    paths: list[Path] = opt.PATHS,
    log: Path = option("--log FILE", "What clients were told: one JSON object a line.", ...),
    tenant: str = option(
        "--tenant FIELD", "The field of the log that says who pays, such as metadata/team.", ""
    ),
    verbose: bool = opt.VERBOSE,
    format: str = opt.TEXT,
    read: Reading = WINDOW,
) -> Answer:
    """Compare the usage that clients were told with the ledger, call by call.

    The log has one JSON object a line: responses of any of the usual forms, or what LiteLLM, Langfuse,
    OpenTelemetry or Envoy AI Gateway log. docs/usage.md says how to write one beside a server.
    """
    from .audit.replay.find import journals_at
    from .exporters import usage_logs
    from .exporters.reports import usage as report

    told = usage_logs.read(log, tenant)
    with read.journals(paths, local=True) as (places, window, _):
        result = report.usage(journals_at(places), told, window)
    return report.answer(result, told, verbose=verbose)


@further(
    "check routing",
    "/var/lib/kvledger",
    "/var/lib/kvledger --index dynamo --format json",
)
def routing(
    paths: list[Path] = opt.BLOCK_PATHS,
    index: str = choice(
        "--index own|tokens|uncounted|dynamo|dynamo-indexer",
        "The index that KV events are replayed through: our own, one that knows tokens and no salts or "
        "adapters, one that drops a hash at its first removal, or Dynamo's (the routing extra): of its "
        "router, which counts blocks, or of its standalone indexer, which does not.",
    ),
    predictions: Path | None = option(
        "--predictions FILE",
        "What a router itself predicted, in place of an index: lines of JSON as "
        '{"request": ID, "predicted": {PORT: TOKENS}}, PORT being that of the engine\'s KV events.',
    ),
    verbose: bool = opt.VERBOSE,
    format: str = opt.TEXT,
    read: Reading = NONE,
) -> Answer:
    """Compare the hits that a router's index promises with what engines had.

    Request by request. The KV events that kvledger journals record-events wrote beside the journals are
    replayed through an index, in the order in which they came. Each token that was predicted and not found,
    or the reverse, has one cause.
    """
    from .audit.replay.find import journals_at
    from .exporters.reports import routing as report

    with read.journals(paths, local=True) as (places, _, _):
        result = report.measured(journals_at(places), index, predictions)
    return report.answer(result, verbose=verbose)


@command(
    opt.WHY,
    "summary /var/lib/kvledger --by hour",
    "summary /var/lib/kvledger --by '^(tenant-[a-z]+)' --format csv",
)
def summary(
    paths: list[Path] = opt.TRACE_PATHS,
    by: str = opt.COLUMNS,
    where: str = opt.WHERE,
    percentiles: str = option(
        "--percentiles COLUMNS",
        "Add the 50th, 95th and 99th percentile of these columns; commas between them.",
    ),
    gpu_hour: float = opt.GPU_HOUR,
    format: str = opt.TABLE,
    read: Reading = ALL,
) -> Answer:
    """Sum up hits, rework, waits.

    Also preemptions, and what lost work cost. Needs the analysis extra: pip install duckdb pandas pyarrow.
    docs/reference/tables.md lists the columns.
    """
    from .exporters.reports import summary as report

    with read.journals(paths) as (places, window, run):
        rows = report.summarize(
            places,
            by,
            window=window,
            run=run,
            with_costs=True,
            gpu_hour=gpu_hour or None,
            where=where,
            percentiles=percentiles,
            group_costs=format != "table",
        )
    return report.answer(rows)


@command(opt.WHY, "why /var/lib/kvledger", "why /var/lib/kvledger --since 1h --format csv")
def why(
    paths: list[Path] = opt.PATHS,
    by: str = opt.COLUMNS,
    where: str = opt.WHERE,
    gpu_hour: float = opt.GPU_HOUR,
    session: str = opt.SESSION,
    format: str = opt.TABLE,
    read: Reading = ALL,
) -> Answer:
    """Explain prefix-cache misses by proven cause.

    With --session it prints the turns of this session, as kvledger why turns does. Needs the analysis extra:
    pip install duckdb pandas pyarrow.
    """
    from .audit.errors import LedgerError
    from .exporters.reports import turns as of_sessions
    from .exporters.reports import why as report
    from .exporters.reports.conclusions import explained_with

    if session and (by or where or gpu_hour):
        raise LedgerError("--session goes with none of --by, --where and --gpu-hour.")
    with read.journals(paths) as (places, window, run):
        if session:
            told = of_sessions.turns(places, session=session, window=window, run=run)
            return of_sessions.answer_of_session(told)
        found = report.why(places, window=window, run=run, gpu_hour=gpu_hour or None, by=by, where=where)
        return report.answer(explained_with(found))


@command(
    opt.WHY,
    'query /var/lib/kvledger "select model, sum(local) / sum(prompt_tokens) from requests group by all"',
    'query /var/lib/kvledger "select * from engines" --format csv',
)
def query(
    paths: list[Path] = opt.TRACE_PATHS,
    sql: str = argument("SELECT", "One SELECT statement."),
    format: str = opt.TABLE,
    read: Reading = ALL,
) -> Answer:
    """Answer a question in SQL over the rows of requests.

    The tables are requests, causes, activity, findings and engines; docs/reference/tables.md lists their
    columns and has twenty questions with their answers. SQL is DuckDB's. Nothing else can be read, and
    nothing can be written. Needs the analysis extra: pip install duckdb pandas pyarrow.
    """
    from .exporters.reports import query as report

    with read.journals(paths) as (places, window, run):
        found = report.ask(places, sql, window=window, run=run)
    for note in found.notes if format == "csv" else ():  # csv has no place for them
        typer.echo(note, err=True)
    return report.answer(found)


@command(
    opt.WHATIF,
    "whatif /var/lib/kvledger",
    "whatif /var/lib/kvledger --blocks 1000,2000",
    "whatif /var/lib/kvledger --tiers 40GiB,500GiB",
    "whatif conversation_trace.jsonl --skip 0.5",
)
def whatif(
    paths: list[Path] = opt.journals(
        "PATH", "Journals of level blocks, folders of journals, or request traces (.jsonl, .jsonl.gz)."
    ),
    blocks: str = option(
        "--blocks N,N,...",
        "Pool sizes to replay. Default: from a quarter of the recorded size until more gains nothing.",
    ),
    tiers: str = option("--tiers SIZE,...", "Sizes of a second tier: 40GiB,500GiB."),
    block_bytes: str = option(
        "--block-bytes SIZE", "Size of one block on all workers. Default: what the engine reported."
    ),
    block_size: int = opt.BLOCK_SIZE,
    skip: float = option(
        "--skip SHARE",
        "Leave out the hits of this share of the requests at the beginning, where the cache is cold.",
        min=0.0,
        max=0.99,
    ),
    format: str = opt.TABLE,
    read: Reading = NOT_DASK,
) -> Answer:
    """Compute the hits of more blocks or a second tier.

    Replays the blocks of a journal of level blocks, or a request trace in the Mooncake format, on pools of
    other sizes. kvledger simulate runs the scheduler too, with any other setting.
    """
    from .audit.analysis.whatif import Options
    from .exporters.answer import size
    from .exporters.reports import whatif as report

    options = Options(
        blocks=report.counts(blocks),
        tiers=report.sizes(tiers),
        block_bytes=size(block_bytes) if block_bytes else 0,
        skip=skip,
    )
    with read.journals(paths) as (places, window, run):
        return report.answer(report.study(places, options, block_tokens=block_size, window=window, run=run))


def _page(output: Path, html: str) -> bool:
    """Write an HTML page, whole or not at all; whether it was printed in place of the report."""
    if str(output) == "-":
        typer.echo(html)
        return True
    from .exporters.files import write_whole

    write_whole(output, html)
    typer.echo(f"Wrote {output}; open it in a browser.", err=True)
    return False


@command(
    opt.WHATIF,
    "simulate /var/lib/kvledger/NAME --set num_gpu_blocks=20000 --set max_num_batched_tokens=4096",
    "simulate /var/lib/kvledger/NAME --release 0.24.0 --release 0.32.0",
    'simulate /var/lib/kvledger/NAME --find num_gpu_blocks --for "hit_share >= 0.45"',
    exit_codes=(
        "Exit codes: 0 simulated; 1 no value meets the goal of --find; 2 bad usage or "
        "input; 3 the simulation does "
        "not trust itself, a configuration could not be simulated, or it was interrupted."
    ),
)
def simulate(
    paths: list[Path] = opt.journals("PATH", "A journal of level blocks, or a request trace (.jsonl)."),
    release: list[str] | None = option("--release RELEASE", "A release of vLLM; several may be given."),
    set_: list[str] | None = option(
        "--set NAME=VALUE",
        "A setting, by vLLM's name; several may be given. A name that is given twice has a "
        "row for each value.",
    ),
    python: list[str] | None = opt.PYTHON,
    rate: float = option("--rate FACTOR", "How much faster the requests come.", 1.0, min=0.001),
    closed_loop: bool = opt.CLOSED_LOOP,
    block_size: int = opt.BLOCK_SIZE,
    steps_of: Path | None = option("--steps-of JOURNAL", "Of a request trace: whose step times to take."),
    find: str = option("--find NAME", "The setting whose smallest value that meets --for is wanted."),
    wanted: str = option('--for "FIGURE >= VALUE"', "The goal of --find, such as hit_share >= 0.45."),
    output: Path | None = option("--output -o FILE", "Also write an HTML page; - prints it only."),
    format: str = opt.TABLE,
    read: Reading = ALL,
) -> Answer:
    """Run recorded traffic with other settings or releases.

    The requests of a journal of level blocks come at their recorded times to the real scheduler, in simulated
    time. First the recorded configuration must give the recording. No GPU and no model is needed. A request
    trace in the Mooncake format needs --set num_gpu_blocks=N. With --dask, workers simulate configurations.
    """
    from .exporters.reports import simulate as report

    with read.journals(paths, local=True) as (places, window, run):
        result = report.run(
            places,
            releases=release or [],
            settings=set_ or [],
            pythons=python or [],
            rate=rate,
            closed=closed_loop,
            find=find,
            wanted=wanted,
            jobs=read.jobs,
            window=window,
            block_tokens=block_size,
            steps_of=steps_of,
            away=run if read.dask else None,
        )
    if output is not None and _page(output, report.html(result)):
        raise typer.Exit(result.code)
    return report.answer(result)


@further(
    "summary prefixes",
    "/var/lib/kvledger",
    "/var/lib/kvledger --top 50 --format csv",
)
def prefixes(
    paths: list[Path] = opt.BLOCK_PATHS,
    top: int = option("--top N", "How many prefixes to list.", 20, min=1),
    format: str = opt.TABLE,
    read: Reading = JOBS,
) -> Answer:
    """List the shared prefixes for which the cache saved and lost most.

    Prefixes are opaque: their labels come from keyed block hashes.
    """
    from .exporters.reports import block_use as report

    with read.journals(paths) as (places, _, run):
        return report.prefixes_answer(report.prefixes(places, most=top, run=run))


@further("summary store", "/var/lib/kvledger", "/var/lib/kvledger --format json")
def store(
    paths: list[Path] = opt.BLOCK_PATHS,
    format: str = opt.TABLE,
    read: Reading = JOBS,
) -> Answer:
    """Sum up what the connector's store returned.

    KV stored, read and never read, seconds waited and saved. What is stored is known at level blocks, of
    connectors whose metadata kvledger reads.
    """
    from .exporters.reports import block_use as report

    with read.journals(paths) as (places, _, run):
        return report.store_answer(report.store(places, run=run))


@further("why turns", "/var/lib/kvledger", "/var/lib/kvledger --session chat-42")
def turns(
    paths: list[Path] = opt.BLOCK_PATHS,
    session: str = opt.SESSION,
    worst: int = option("--worst N", "How many sessions to list.", 20, min=1),
    block_size: int = opt.BLOCK_SIZE,
    format: str = opt.TABLE,
    read: Reading = NOT_DASK,
) -> Answer:
    """Explain what turns of sessions missed of the turn before.

    A session is vLLM's session id, what KVLEDGER_SESSION finds in the request id, or inferred from block
    hashes. PATH may be a request trace in the Mooncake format, too. As csv: one line per turn.
    """
    from .exporters.reports import turns as report

    with read.journals(paths) as (places, window, run):
        result = report.turns(
            places,
            session=session,
            most=worst,
            block_tokens=block_size,
            window=window,
            run=run,
        )
    return report.answer_of_session(result) if session else report.answer(result)


@further("summary blocks", "/var/lib/kvledger")
def blocks(paths: list[Path] = opt.BLOCK_PATHS, format: str = opt.TABLE, read: Reading = JOBS) -> Answer:
    """Sum up how blocks were used: states, evictions, lifetimes, reuse."""
    from .exporters.reports import block_use as report

    with read.journals(paths) as (places, _, run):
        return report.answer(report.block_use(places, run=run))


@command(opt.SETUP, "journals /var/lib/kvledger", "journals /var/lib/kvledger --audit")
def journals(
    paths: list[Path] = opt.PATHS,
    audit: bool = option("--audit", "Replay the journals and print their verdicts."),
    format: str = opt.TABLE,
    read: Reading = JOBS,
) -> Answer:
    """List the journals.

    With their names, models, hosts, releases, times, requests and bytes. Every command takes a short name in
    place of a path: NAME for a journal in KVLEDGER_DIR or the current folder, FOLDER/NAME for one in another
    folder. Recordings of KV events have the level "events". Reads the beginning and the end of each journal
    only; --audit replays them for their verdicts.
    """
    from .exporters.reports import listing as report

    with read.journals(paths) as (places, _, run):
        return report.answer(report.journals(places, audit=audit, run=run))


@further("journals compact", "/var/lib/kvledger", "/var/lib/kvledger --keep 30d")
def compact(
    paths: list[Path] = opt.PATHS,
    keep: str = option("--keep AGE", "Remove rows of requests that ended longer ago, such as 30d."),
    format: str = opt.TABLE,
    read: Reading = JOBS,
) -> Answer:
    """Read journals once, and keep their requests as rows of Parquet.

    The rows are in .kvledger-facts beside the journals, by engine and hour; summary, why, report and query
    read them and replay only what came since. Of a journal of level blocks the rows about blocks are kept
    too, which whatif, summary prefixes and summary blocks read. Run it again to add what was recorded since.
    The rows stay when the journal is removed. Where --keep removes rows, sums by the hour stay for a year.
    Needs the analysis extra: pip install duckdb pandas pyarrow.
    """
    from .exporters.facts.compact import retention
    from .exporters.reports import listing as report

    with read.journals(paths, local=True) as (places, _, run):
        return report.answer_of_compacted(report.compact_all(places, keep=retention(keep), run=run))


@further(
    "journals prune",
    "/var/lib/kvledger --older-than 30d",
    "/var/lib/kvledger --most 50GiB --yes",
)
def prune(
    folder: Path = opt.JOURNAL_FOLDER,
    older_than: str = option(
        "--older-than AGE", "Journals that ended longer ago: 30d, or before an ISO time."
    ),
    most: str = option("--most SIZE", "The oldest journals, until the rest takes SIZE at most: 50GiB."),
    yes: bool = option("--yes", "Remove them."),
    format: str = opt.TABLE,
) -> Answer:
    """Remove old journals of ended engines; without --yes, list them only.

    Journals of live engines stay. Workers' journals go with those of their engine. Recordings of KV
    events are journals of their own.
    """
    from .audit.replay.windows import window
    from .exporters.answer import size
    from .exporters.reports import listing as report

    result = report.prune(
        folder,
        before_seconds=window(older_than).since,
        most_bytes=size(most) if most else None,
        remove=yes,
    )
    return report.answer_of_pruned(result)


@command(
    opt.WHY,
    "diff journals/before journals/after",
    "diff journals/before journals/after --explain",
    exit_codes=(
        "Exit codes: 0 compared, and with --explain explained; 2 bad usage or input, with --explain also a "
        "recording that can't be simulated, or a release without an environment; 3 the explanation does not "
        "trust itself, or was interrupted."
    ),
)
def diff(
    before: Path = opt.journals("BEFORE", "A journal, or a folder of journals."),
    after: Path = opt.journals("AFTER", "The one to compare."),
    by: str = opt.BY,
    explain: bool = option(
        "--explain",
        "Simulate the way from one to the other: the parts of traffic, release and each setting. Both need "
        "level blocks.",
    ),
    python: list[str] | None = opt.PYTHON,
    closed_loop: bool = opt.CLOSED_LOOP,
    verbose: bool = option("--verbose -v", "Print figures that did not change too."),
    format: str = opt.TABLE,
    read: Reading = ALL,
) -> Answer:
    """Compare two traces: figures, findings, meanings.

    Where the two vLLM releases mean different things by a figure, both meanings are printed. Needs the
    analysis extra: pip install duckdb pandas pyarrow.
    """
    from .exporters.inputs import journals
    from .exporters.reports import diff as report

    if explain:
        from .exporters.reports import diff_explained as explained

        with read.journals([before, after], local=True) as (places, window, run):
            found = explained.explained(
                places,
                pythons=python or [],
                closed=closed_loop,
                jobs=read.jobs,
                window=window,
                run=run,
                by=by,
            )
        return explained.answer(found, verbose=verbose)
    with read.journals([before, after]) as (_, window, run):
        result = report.compare(journals([before]), journals([after]), window=window, run=run, by=by)
    return report.answer(result, verbose=verbose)


@command(
    opt.WHY,
    "incident /var/lib/kvledger",
    "incident /var/lib/kvledger --at 2026-01-31T12:00:00Z --against yesterday",
    exit_codes=f"{opt.AUDIT_CODES}.",
)
def incident(
    paths: list[Path] = opt.PATHS,
    at: str = option("--at TIME", "When the alarm came. Default: now."),
    since: str = option("--since TIME", "When it began: an ISO time, or an age before --at.", "30m"),
    against: str = option(
        "--against before|yesterday|SPAN|PATH",
        "What to compare with: the day before, the same time yesterday, a span such as 15m before, or other "
        "journals.",
        "before",
    ),
    verbose: bool = option("--verbose -v", "Print all causes, and figures that did not change."),
    format: str = opt.TEXT,
    read: Reading = JOBS,
) -> Answer:
    """Name the likeliest cause of an alarm.

    Compares with a time before. Prints the cause with what helps now and the command to run next, what became
    worse for users, and what changed: settings, traffic, hits, first tokens, findings. The exit code is that
    of the verdict. Needs the analysis extra: pip install duckdb pandas pyarrow.
    """
    from .exporters.reports import incident as report

    with read.journals(paths) as (places, _, run):
        found = report.incident(places, at=at, since=since, against=against, run=run)
    return report.answer(found, verbose=verbose)._replace(code=CODES[found.verdicts[1]])


@command(opt.RIGHT, "explain", "explain tokens/negative", "explain vllm:prefix_cache_hits")
def explain(
    name: str = argument(
        "[NAME]",
        "An invariant such as tokens/balance, a term such as life, a fault, or a figure of an engine such as "
        "vllm:prefix_cache_hits. Without it: a list.",
        default="",
    ),
) -> None:
    """Explain a term, an invariant, a fault or a metric."""
    from .exporters.reports import faults as report
    from .exporters.terminal import rendered, show

    if name:
        typer.echo(report.explanation(name))
    else:
        show(rendered(report.names()))


@further("doctor faults", "--vllm 0.18.1", "--lmcache 0.3.9 --format csv")
def faults(
    vllm: str = option("--vllm RELEASE", "A release of vLLM."),
    lmcache: str = option("--lmcache RELEASE", "A release of LMCache."),
    sglang: str = option("--sglang RELEASE", "A release of SGLang."),
    format: str = opt.TEXT,
) -> Answer:
    """List the known faults of a vLLM, LMCache or SGLang release.

    Each with its conditions, the releases that have it and the finding that shows it. Without options: of
    the releases installed here, or of all if there is none. As csv: one line per fault.
    """
    from .audit.entry.doctor import installed
    from .audit.release_semantics import Product
    from .exporters.reports import faults as report

    asked: dict[Product, str] = {"vllm": vllm, "lmcache": lmcache, "sglang": sglang}
    return report.answer(report.faults(asked, {} if any(asked.values()) else installed()))


# --- write files ----------------------------------------------------------------------------------------


@further("export html", "/var/lib/kvledger -o page.html", exit_codes=f"{opt.AUDIT_CODES}.")
def report(
    paths: list[Path] = opt.PATHS,
    output: Path = opt.OUTPUT,
    by: str = opt.BY,
    gpu_hour: float = opt.GPU_HOUR,
    read: Reading = ALL,
) -> int:
    """Write one HTML page: the audit, its findings and plots.

    The page loads nothing from the network. The verdict is printed too, on standard error.
    """
    from .exporters.reports import audit, page
    from .exporters.terminal import rendered, show

    with read.journals(paths) as (places, window, run):
        data = page.gather(places, window=window, run=run, gpu_hour=gpu_hour or None, by=by)
    if str(output) == "-":
        typer.echo(page.html(data))
    else:
        page.save(data, output)
        show(rendered(Answer(data, list(audit.sentences(data.report)))), stderr=True)
        typer.echo(f"Wrote {output}; open it in a browser.", err=True)
    return CODES[data.report.verdict]


@command(
    opt.SETUP,
    "export /var/lib/kvledger -o tables",
    "export /var/lib/kvledger -o tables --entries",
    "export /var/lib/kvledger -o tables --table requests --table lives",
)
def export(
    paths: list[Path] = opt.PATHS,
    output: Path = option("--output -o DIR", "The folder to write.", ...),
    table: list[str] | None = option("--table NAME", "Write only this table. Repeatable."),
    entries: bool = option("--entries", "Write the table of entries, too. It takes most time and space."),
    read: Reading = WINDOW,
) -> None:
    """Write tables as Parquet.

    The tables are requests, causes, findings, lives and steps, and at level blocks stays and occupancy; with
    --entries also each entry of each account. docs/reference/tables.md lists their columns. They need the
    analysis extra: pip install duckdb pandas pyarrow.
    """
    from .exporters.trace import columns
    from .exporters.trace.parquet import export as write_tables

    with read.journals(paths, local=True) as (places, window, _):
        usual = tuple(name for name in columns.TABLES if name != "entries")
        wanted = (*(table or usual), *(("entries",) if entries else ()))
        counts = write_tables(places, output, tuple(dict.fromkeys(wanted)), window)
    for name, count in counts.items():
        typer.echo(f"{output / name}.parquet: {count:,} rows", err=True)


@further("export timeline", "/var/lib/kvledger --since 5m -o timeline.json")
def timeline(paths: list[Path] = opt.PATHS, output: Path = opt.OUTPUT, read: Reading = WINDOW) -> None:
    """Write a timeline for Perfetto or chrome://tracing.

    It has one track per request, one slice per life, arrows from preemption to resumption, and counters of
    requests and free blocks. Open the file at https://ui.perfetto.dev.
    """
    from .exporters.trace.timeline import save, write_timeline

    with read.journals(paths, local=True) as (places, window, _):
        if str(output) == "-":
            write_timeline(places, sys.stdout, window)
            return
        count = save(places, output, window)
    typer.echo(f"{output}: {count:,} trace events. Open it at https://ui.perfetto.dev.", err=True)


@command(
    opt.RIGHT,
    "repro /var/lib/kvledger",
    "repro /var/lib/kvledger --finding tokens/negative -o test_negative.py --issue bug.md --yes",
    exit_codes="Exit codes: 0 reproduced, and the test fails here; 1 not reproduced; 2 bad usage or input; "
    "3 a reproduction can't show this finding; 4 the test was written, and it was not run to its end.",
)
def repro(
    path: Path = opt.PATH,
    finding: str = option("--finding ID", "The finding, such as tokens/negative."),
    request: str = option("--request REQUEST", "The request of the finding."),
    output: Path = option("--output -o FILE", "The test to write; - prints it.", Path("test_repro.py")),
    issue: Path | None = option("--issue FILE", "Also write a bug report with the test, as Markdown."),
    budget: str = option("--budget TIME", "The most time to spend: 90s, 5m.", "120s"),
    python: str = option(
        "--python INTERPRETER", "The Python whose vLLM is driven. Default: the one that runs kvledger."
    ),
    any_release: bool = option(
        "--any-release", "Drive the installed vLLM, although the journal is of another release."
    ),
    scheduler: str = option(
        "--scheduler MODULE:CLASS", "The scheduler class of the journal, if it is not vLLM's own."
    ),
    yes: bool = option("--yes -y", "Run the written test once without being asked."),
    format: str = opt.TEXT_OR_JSON,
) -> Answer | int:
    """Turn a finding into a small test.

    The pytest file fails without kvledger. Cuts the journal down, drives the scheduler of the installed vLLM,
    which must have the journal's release, and shrinks the workload while the finding comes back. No prompt,
    token or request id of the journal is in the file. The file is run once, after a question, without network
    and with bounded memory and time. Ctrl-C keeps the smallest workload so far. Needs the
    vllm extra: pip install vllm.
    """
    from .exporters.reports import repro as report

    _silence_vllm()
    return report.run(
        path,
        finding=finding,
        request=request,
        output=output,
        issue=issue,
        budget=budget,
        any_release=any_release,
        scheduler=scheduler,
        python=python,
        yes=yes,
        as_json=format == "json",
    )


# --- live engines ---------------------------------------------------------------------------------------


@command(
    opt.SETUP,
    "doctor",
    "doctor -v",
    exit_codes="Exit codes: 0 an engine started here would be observed; 1 it would not.",
)
def doctor(
    verbose: bool = option("--verbose -v", "Print what figures mean, what is not checked, and connectors."),
    with_import: bool = option(
        "--import", "Import vLLM too, which takes longer: does the installation work?"
    ),
    format: str = opt.TEXT,
) -> Answer:
    """Check whether the vLLM here can be observed.

    Reads vLLM's source files, which takes a second. As csv: one line per fact, by topic.
    """
    from .audit.entry.doctor import diagnose
    from .exporters.reports import doctor as report
    from .exporters.terminal import spinner

    _silence_vllm()
    diagnosis = diagnose(with_import=with_import, importing=lambda: spinner("importing vLLM"))
    return report.answer(diagnosis, verbose=verbose)


@further("audit follow", "/var/lib/kvledger")
def tail(
    path: Path = opt.PATH,
    by: str = opt.BY,
    wait: bool = option("--wait", "Keep waiting for new engines after all engines have ended."),
    format: str = opt.TEXT,
) -> None:
    """Follow journals live: totals, rates and the newest findings.

    Prints plain lines where the output is not a terminal; as json one object per line, as csv the totals
    only. Ends when all engines have ended, or with Ctrl-C.
    """
    from .exporters.reports.tail import follow

    follow(path, wait=wait, format=format, by=by)


@further(
    "journals record-events",
    "/var/lib/kvledger --endpoint tcp://localhost:5557 --replay tcp://localhost:5558",
)
def record_events(
    folder: Path = opt.JOURNAL_FOLDER,
    endpoint: str = option(
        "--endpoint ADDRESS",
        "The publisher's address: endpoint of --kv-events-config, with the engine's host.",
        "tcp://localhost:5557",
    ),
    replay: str = option(
        "--replay ADDRESS",
        "Where the publisher repeats missed batches: replay_endpoint of --kv-events-config.",
    ),
    topic: str = option("--topic TEXT", "Only batches of this topic."),
) -> None:
    """Record an engine's KV events beside its journal, until it is interrupted.

    The engine publishes them with --kv-events-config. Both processes need the same KVLEDGER_EVENTS_KEY. The
    journal holds keyed hashes, and no token ids. kvledger audit compares it with the engine's blocks.
    """
    import signal
    import threading

    from .exporters.kv_events import record

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())

    def say(why: str) -> None:
        typer.echo(f"kvledger: {why}.", err=True)

    for line in record(folder, endpoint, replay, topic, stop, say):
        typer.echo(line)


@command(
    opt.SETUP,
    "serve /var/lib/kvledger",
    "serve /var/lib/kvledger --engine-url http://localhost:8000/metrics",
    "serve /var/lib/kvledger --check-config",
)
def serve(
    path: Path = opt.journals("PATH", "A journal, a folder of journals, or a folder with one for each host."),
    address: str = setting("--web.listen-address HOST:PORT", "Where to listen.", "127.0.0.1:9464"),
    config: Path | None = setting(
        "--web.config.file FILE",
        "TLS and users, in the format of Prometheus's exporter-toolkit. "
        "Needs the web extra: pip install bcrypt pyyaml.",
    ),
    telemetry_path: str = setting("--web.telemetry-path PATH", "The path of the metrics.", "/metrics"),
    state: Path | None = setting(
        "--state DIR", "The folder of the checkpoint. Default: .kvledger under PATH."
    ),
    compact: str = setting(
        "--compact AGE", "Run kvledger journals compact on the journals at this interval, such as 1h."
    ),
    keep: str = setting(
        "--keep AGE", "With --compact: remove rows of requests that ended longer ago, such as 30d."
    ),
    engine_url: list[str] | None = setting(
        "--engine-url URL", "An engine's own /metrics, to compare with the ledger. Repeatable."
    ),
    log_level: str = setting(
        "--log.level debug|info|warn|error", "The least severe lines to log.", "info", kind=choice
    ),
    log_format: str = setting("--log.format text|logfmt|json", "The form of log lines.", kind=choice),
    check_config: bool = option("--check-config", "Check options and files, then exit: 0 valid, 2 not."),
) -> None:
    """Follow journals and serve /metrics for Prometheus.

    Every engine under PATH is followed, also engines that start later. The page / lists what is served. A
    restarted server continues from its checkpoint and counts nothing twice.
    """
    from .exporters.sidecar import serve
    from .exporters.sidecar.serve import Log

    log = Log(log_level, log_format)
    settings: dict[str, Any] = {
        "folder": state,
        "config": config,
        "engine_urls": engine_url or (),
        "telemetry_path": telemetry_path,
        "compact": compact,
        "keep": keep,
    }
    if check_config:
        serve.check_config(path, address, **settings)
        typer.echo("The configuration is valid.")
    else:
        with left_out_to(log):
            serve.serve(path, address, log, inform=log.info, **settings)


@command(opt.SETUP, "deploy compose -o kvledger-compose", "deploy systemd > kvledger.service")
def deploy(
    form: str = argument("FORM", "compose, kubernetes, helm, systemd or containerfile."),
    output: Path | None = option(
        "--output -o DIR", "The folder to write; files in it are not replaced. Without it: print."
    ),
) -> None:
    """Write files to run and watch it.

    Prints or writes the files that run kvledger beside a server. The forms are compose, kubernetes (a
    kustomize component), helm, systemd and containerfile. docs/deploy.md explains them.
    """
    from .dashboards import deploy_files

    chosen = deploy_files.form(form)
    if output is None:
        typer.echo(deploy_files.printed(chosen))
        return
    for path in deploy_files.write(chosen, output):
        typer.echo(path)
    typer.echo(f"{chosen.next}.", err=True)


@further("deploy boards", "boards --form sharing")
def boards(folder: Path = opt.FOLDER, form: str = opt.FORM) -> None:
    """Write the boards as Grafana JSON."""
    from .dashboards import boards as files

    for path in files.write(folder, files.form(form)):
        typer.echo(path)


@further("deploy rules", "rules")
def rules(folder: Path = opt.FOLDER) -> None:
    """Write the recording and alert rules for Prometheus."""
    from .dashboards import deploy_files as file

    typer.echo(file.write_rules(folder))


@further(
    "deploy check",
    "boards",
    "--prometheus http://localhost:9090",
    exit_codes="Exit codes: 0 all checks pass; 1 a check fails; 2 bad usage or input.",
)
def check_dashboards(
    folder: Path | None = argument("[DIR]", "Exported files, to compare with those of this version.", None),
    form: str = opt.FORM,
    prometheus: str = option("--prometheus URL", "Run every query there."),
) -> int:
    """Check that panels and rules name only served metrics, and which return data."""
    from .dashboards import boards, check

    result = check.check(folder, boards.form(form), prometheus)
    for line in result.lines:
        typer.echo(line)
    return 0 if result.passed else 1


# --- engines and connectors to try ----------------------------------------------------------------------


@command(
    opt.TRY,
    "demo",
    "demo --inject negative-local-hit --keep /tmp/tour",
    "demo --engine sglang --inject cached-tokens-counted-again",
    exit_codes=opt.EXIT_CODES,
)
def demo(
    engine: str = option("--engine vllm|sglang", "The engine that runs.", "vllm"),
    inject: str | None = option(
        "--inject NAME|list",
        "Put a defect of a released version back into the engine; list names the defects. The exit code is "
        "then 0 if the audit finds the defect, and 1 if it does not.",
    ),
    verbose: bool = opt.VERBOSE,
    format: str = opt.TEXT_OR_JSON,
    keep: Path | None = option(
        "--keep DIR",
        "An empty or new folder for journal, log and result. Default: a temporary folder, which is not "
        "removed.",
    ),
) -> Answer:
    """Run a real engine on this CPU and audit it.

    vLLM serves a tiny generated model, with shared prefixes, too few blocks and a connector that stores KV in
    a folder. It takes less than a minute. Needs the vllm extra: pip install vllm. SGLang serves
    the same model with too few slots; its wheel is fetched beside the packages of that extra.
    """
    from .exporters.reports import demo as report

    if engine == "sglang":
        return report.run_sglang(inject, keep, lambda sentence: typer.echo(sentence, err=True))
    if engine != "vllm":
        from .audit.errors import LedgerError

        raise LedgerError(f"There is no demo of {engine!r}; write vllm or sglang.")
    return report.injections() if inject == "list" else report.run(inject, keep, verbose=verbose)


@command(
    opt.TRY,
    "conformance example",
    "conformance lmcache",
    "conformance MyConnector --module my_connector.py",
    "conformance --keys",
    exit_codes="Exit codes: 0 clean; 1 violated, or a situation broke; 2 bad input; 3 unknown.",
)
def conformance(
    connector: str = argument(
        "CONNECTOR",
        "lmcache, nixl, offloading, mooncake or example, which need no options; or as in kv_connector.",
        "",
    ),
    module: Path | None = option("--module PATH", "The Python file of a connector that is not vLLM's."),
    options: str | None = option(
        "--options JSON",
        "Its kv_connector_extra_config. {folder} in it becomes an empty folder per situation.",
    ),
    disaggregated: bool = option(
        "--disaggregated",
        "The connector reads from another engine, not from a store: one prefills what it loads. "
        "Implied for NixlConnector.",
    ),
    drawn: int | None = option(
        "--histories N",
        "How many random histories to drive beside the fixed situations, under each scheduler.",
        min=0,
    ),
    keys: bool = option(
        "--keys",
        "Instead, print which differences between two requests part their KV in the connector's store; "
        "without CONNECTOR in the prefix cache, and which of them KV events tell.",
    ),
    verbose: bool = option("--verbose -v", "List clean situations too, and print vLLM's log."),
    format: str = choice("--format text|json|markdown", "The output format."),
) -> Answer:
    """Drive a KV connector through a scenario; score it.

    The real scheduler and the connector's own scheduler side and worker side run on the CPU. The model is
    generated, so that loaded KV can be compared with the KV that it should be. Needs the vllm extra.
    """
    from .audit.errors import LedgerError
    from .exporters.reports import conformance as report

    if not verbose:
        _silence_vllm()
    if keys:
        return report.run_keys(connector, module, options)
    if not connector:
        raise LedgerError("Name a connector, or give --keys.")
    whole = verbose or format == "markdown"  # a page lists clean situations too
    return report.run(connector, module, options, disaggregated or None, drawn, verbose=whole)


@further(
    "repro bisect",
    "test_repro.py --releases 0.17.0..0.33.0",
    "test_repro.py --python 0.23.0=old/bin/python --python 0.24.0=new/bin/python",
    exit_codes="Exit codes: 0 a release fails; 1 none fails; 2 bad usage or input.",
)
def bisect(
    file: Path = argument("FILE", "A test that kvledger repro wrote."),
    releases: str = option(
        "--releases FIRST..LAST",
        "Only these, of the environments of a checkout; or names with commas between.",
    ),
    python: list[str] | None = option(
        "--python [NAME=]INTERPRETER",
        "A Python that has a vLLM, beside those of --releases, or alone. The name is a release or any other. "
        "Repeatable.",
    ),
    jobs: int = option("--jobs -j N", "Releases at a time. Default: one per core."),
    format: str = opt.TEXT_OR_JSON,
) -> Answer:
    """Run a test of repro on several vLLM releases.

    The file runs without network, with bounded memory and time. It prints the first bad, the last bad and the
    first good release. A checkout of kvledger has environments for the releases (scripts/releases.py builds
    them). Elsewhere, name the interpreters of your own environments.
    """
    from .exporters.reports import repro as report

    return report.bisect(file, releases, python or (), jobs)


@further("repro checks", "-o tests/kv_invariants.py")
def export_checks(
    output: Path = option("--output -o FILE", "The file to write; - prints it.", Path("-")),
) -> None:
    """Write checks of the KV cache for vLLM's own tests.

    One Python file that imports nothing of kvledger. It has assert_kv_invariants(scheduler), to be called
    after schedule() and update_from_output().
    """
    from .audit.entry.export_checks import export

    export(output)


# --- other ----------------------------------------------------------------------------------------------


@command(opt.TRY, "completion bash >> ~/.bashrc")
def completion(
    shell: str = argument(SHELLS, "Your shell.", callback=opt.one_of(SHELLS.split("|"))),
) -> None:
    """Print the completion script for your shell."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    typer.echo(get_completion_script(prog_name="kvledger", complete_var=COMPLETE, shell=shell))


def _silence_vllm() -> None:
    """Keep the start-up logs of vLLM and LMCache out of the answer, unless the user chose a log level."""
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(level)  # vLLM leaves it alone where VLLM_CONFIGURE_LOGGING is 0


if __name__ == "__main__":
    main()
