"""The table of `make proof NAME=parallel`, as it stands in docs/usage.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import page

PAGE = page.ROOT / "docs" / "usage.md"
HEADING = "## Servers of several processes\n"
COLUMNS = (
    "server",
    "requests of each engine",
    "calls",
    "equal",
    "explained, by cause",
    "unexplained",
    "aborted, in no line",
    "hit blocks that held the sealed KV",
    "loaded blocks that held the stored KV",
    "violations",
    "drifts",
)


class Row(NamedTuple):
    """What was found of one server. ``requests``: of each engine. ``workers``: those that verified KV.

    ``verified`` and ``moved``: blocks that were found equal, and all that were looked at.
    """

    options: str
    requests: tuple[int, ...]
    calls: Mapping[str, int]
    causes: Mapping[str, int]
    unlogged: Mapping[str, int]
    violations: tuple[str, ...]
    drifts: Mapping[str, int]
    verdict: str
    workers: int | None
    verified: tuple[int, int]
    moved: tuple[int, int]
    wrong: tuple[str, ...] = ()
    """What a finding that was induced does not say as it should."""


def row(options: str, requests: Sequence[int], usage: Mapping[str, Any], audit: Any) -> Row:
    """The row of a server, of the JSON of ``kvledger check usage`` and ``kvledger audit``."""
    outcomes = [each["outcome"] for each in usage["unlogged"]]
    contents = audit["contents"]
    found = contents or dict.fromkeys(("verified", "differed", "moved", "moved_differed", "moved_unknown"), 0)
    return Row(
        options,
        tuple(requests),
        usage["calls"],
        {cause: count for cause, count in usage["causes"].items() if cause != "not-told"},
        {outcome: outcomes.count(outcome) for outcome in outcomes},
        tuple(each["id"] for each in audit["violations"] if each["severity"] == "violation"),
        Counter(each["id"] for each in audit["violations"] if each["severity"] == "drift"),
        audit["verdict"],
        contents["workers"] if contents else None,
        (found["verified"], found["verified"] + found["differed"]),
        (found["moved"], found["moved"] + found["moved_differed"] + found["moved_unknown"]),
    )


def problems(
    row: Row,
    engines: int,
    workers: int,
    answers: int,
    left: int,
    expected: tuple[str, ...] = (),
    prefilled: int = 0,
) -> Iterator[str]:
    """What is not as it should be: a difference without a cause, a finding, an engine without requests.

    ``left``: how many clients leave, of whose first attempt no line of the log tells. ``expected``: the
    findings that were induced. ``prefilled``: how many calls the prefill engine alone gets, which has no log.
    """
    yield from row.wrong
    logged = sum(row.calls.values())
    if logged != answers:
        yield f"{logged} of {answers} calls are in the log"
    for verdict in sorted(set(row.calls) - {"equal", "explained"}):
        if row.calls[verdict]:
            yield f"{row.calls[verdict]} calls are {verdict}"
    if row.violations != expected or row.verdict != ("violated" if expected else "clean"):
        yield f"the audit is {row.verdict}: {', '.join(row.violations) or 'no violation'}"
    if len(row.requests) != engines or not all(row.requests):
        yield f"of {engines} engines, these were observed with so many requests: {row.requests}"
    if row.workers is not None and row.workers != workers:
        yield f"of {workers} workers, {row.workers} verified the KV in their blocks"
    unlogged = dict(row.unlogged)
    if unlogged.pop("length_capped", 0) != prefilled or unlogged.pop("aborted", 0) > left or unlogged:
        yield f"calls in no line of the log: {dict(row.unlogged)}"


Line = tuple[str, ...]
"""The cells of a row."""


def line(row: Row) -> Line:
    """A row as it stands on the page."""
    return (
        f"`{row.options}`" if row.options.startswith("-") else row.options,
        " + ".join(map(str, row.requests)),
        str(sum(row.calls.values())),
        str(row.calls["equal"]),
        _listed(row.causes),
        str(row.calls["unexplained"]),
        str(row.unlogged.get("aborted", 0)),
        _of(row.verified),
        _of(row.moved),
        str(len(row.violations)),
        _listed(row.drifts),
    )


def merged(before: Sequence[Line], lines: Sequence[Line]) -> list[Line]:
    """The lines of a page, with those of the servers that were run anew."""
    found = {each[0]: each for each in before}
    return list((found | {each[0]: each for each in lines}).values())


def section(lines: Sequence[Line], level: str, software: str) -> str:
    """The section of the page."""
    return f"""{HEADING}
`make proof NAME=parallel` starts `vllm serve` with the plugin at level `{level}` and the middleware, sends a
mixed load with six clients at once, ends the server, and runs `kvledger check usage` and `kvledger audit`
over the journals of all engines. This ran with {software}.

{page.table(COLUMNS, lines)}

The load: plain calls that share prompts; calls of four samples; calls of two prompts; streams; two calls
with one `X-Request-Id` that run at the same time; clients that leave a stream and send their call again
with the same `X-Request-Id`; and tool loops, chats whose next turn has the earlier turns, the call of a
tool and its result. The pool is too small for all of it, so blocks are evicted. A prefill and a decode
engine get single calls, streams, repeated calls, clients that leave, and prompts that grow. Where one byte
is changed, after NIXL has filled a block of the decode engine and before that engine reads it,
`content/transfer` has to name that block, its layer, and the requests of both engines. Where a request is
read after the lease of its blocks, the prefill engine has computed other requests in them by then: vLLM 0.32
reads them all the same (it checks the time only when a prefill engine reads back what a decode engine
computed), and `content/transfer` has to name all blocks of the request, their tokens, and both engines.

Each rank of data parallelism is an engine with a journal and a prefix cache of its own: a prompt that one
rank cached is computed by the other one, and the samples of one call may be on both. The workers of
tensor parallelism have one scheduler and one journal; at level `content` each worker also has a journal
of what it verified, and a hit block counts once for each worker. So does each stage of pipeline
parallelism, for its own layers. That server runs without `--enforce-eager`: with it, vLLM 0.32 on a CPU
skips the profile run, the only place that allocates what the second stage receives, and the first request
fails (`assert self.intermediate_tensors is not None` in `GPUModelRunner`), also without kvledger.
"""


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "0"


def _of(blocks: tuple[int, int]) -> str:
    equal, looked_at = blocks
    return f"{equal:,} of {looked_at:,}" if looked_at else ""


def written(path: Path = PAGE) -> list[Line]:
    """The lines of the table on the page."""
    text = path.read_text().partition(HEADING)[2].partition("\n## ")[0]
    table = [row for row in text.splitlines() if row.startswith("| ")][1:]  # without the heading
    cells = [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in table]
    return [row for row in cells if len(row) == len(COLUMNS) and not set(row[0]) <= {"-"}]
