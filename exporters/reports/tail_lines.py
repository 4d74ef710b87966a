"""``kvledger audit follow``: prints the figures of followed journals, which are in ``tail_screen.py``.

On a terminal a table is redrawn twice a second; elsewhere a line is printed periodically and for each
finding.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...audit.checks.registry import Violation
from ...audit.errors import LedgerError
from ...audit.replay.followed_audit import FollowedAudit
from ...audit.replay.parallel import is_remote
from ..csv_cells import structs_csv
from .audit_data import finding, share
from .tail_screen import GroupNow, LiveCounts, LiveTail, Now
from .terminal import VERDICTS, console, counted, figures_table, percent

POLL_SECONDS = 0.5
SHOWN_GROUPS = 20
"""The most groups that a screen or a line shows."""

LINE_SECONDS = 10.0
"""How often a line of totals is printed where the output is no terminal."""


def line(now: Now) -> str:
    """The figures as one line."""
    hits = share(now.local + now.external, now.prompt_tokens)
    parts = [
        counted(now.requests, "request"),
        now.counts,
        f"{now.running:,} running",
        f"{now.waiting:,} waiting",
        f"{counted(now.preemptions, 'preemption')}",
        f"{now.prompt_tokens:,} prompt tokens",
        "no prompt settled yet" if hits is None else f"{percent(hits)} hits",
        f"{now.scheduled_tokens_per_second:,.0f} tokens/s",
    ]
    return f"{now.examined}. {', '.join(parts)}"


def screen(tail: LiveTail) -> Group:
    """The present figures as a table for a terminal, with the newest findings."""
    columns = ("requests", "running", "waiting", "prompt/s", "tokens/s", "hits", "preempted", "verdict")
    table = figures_table("engine", *columns)
    for engine_audit, running in tail.engines():
        _add_row(table, engine_audit, running)
    now = tail.now()
    parts: list[Table | Text] = [table, Text(), Text(f"{now.examined}. {now.counts}.", overflow="fold")]
    if tail.by:
        parts += [Text(), _groups(tail)]
    if tail.newest:
        parts += [Text(), Text("Newest findings", style="bold")]
        parts += [Text(_sentence(violation), overflow="fold") for violation in tail.newest]
    return Group(*parts, Text(), Text("Press Ctrl-C to stop.", style="dim"))


def _add_row(table: Table, engine_audit: FollowedAudit, running: LiveCounts | None) -> None:
    """Add one engine; ``running`` is None once the engine has ended."""
    totals, verdict = engine_audit.totals(), engine_audit.verdict
    counts = running or LiveCounts()
    prompt, scheduled = counts.rates()
    hits = share(totals.local + totals.external, totals.prompt_tokens)
    table.add_row(
        Text(f"{engine_audit.name}{'' if running else ' (ended)'}"),
        f"{totals.requests:,}",
        f"{counts.requests.running:,}",
        f"{counts.requests.waiting:,}",
        f"{prompt:,.0f}",
        f"{scheduled:,.0f}",
        "" if hits is None else percent(hits),
        f"{totals.preemptions:,}",
        Text(verdict, style=VERDICTS[verdict]),
    )


def _groups(tail: LiveTail) -> Table:
    """The ended requests of the largest groups."""
    table = figures_table(f"ended requests by {tail.by}", "requests", "prompt", "hits", "preempted")
    groups = tail.groups()
    if len(groups) > SHOWN_GROUPS:
        table.caption = _shown(len(groups))
    for row in groups[:SHOWN_GROUPS]:
        hits = share(row.local + row.external, row.prompt_tokens)
        table.add_row(
            Text(row.group),
            f"{row.requests:,}",
            f"{row.prompt_tokens:,}",
            "" if hits is None else percent(hits),
            f"{row.preemptions:,}",
        )
    return table


def _sentence(violation: Violation) -> str:
    return f"{violation.severity} {violation.id}: {violation.message}"


def follow(
    path: Path,
    *,
    wait: bool = False,
    poll_seconds: float = POLL_SECONDS,
    out: Console | None = None,
    format: str = "text",
    by: str = "",
) -> None:
    """Follow ``path`` until all engines have ended or, with ``wait``, until interrupted.

    ``json`` prints one object a line, for totals, findings and groups; ``csv`` prints the totals alone.
    ``by`` names groups of ended requests, as for :func:`~kvledger.exporters.trace.groups.group_key`. Raises
    :class:`LedgerError` for a path that holds no journal.
    """
    out = out or console()
    if is_remote(path):
        raise LedgerError(f"{path} can't be followed: only folders of this machine can.")
    tail = LiveTail(path, by)
    try:
        if out.is_terminal and format == "text":
            with Live(console=out, auto_refresh=False, transient=False) as live:
                _until_ended(tail, wait, poll_seconds, lambda _: live.update(screen(tail), refresh=True))
        else:
            _until_ended(tail, wait, poll_seconds, _Lines(tail, format).show)
    finally:
        tail.close()


class _Lines:
    """Prints findings as they come, and totals every LINE_SECONDS."""

    def __init__(self, tail: LiveTail, format: str) -> None:
        self._tail = tail
        self._format = format
        """``text``, ``json`` or ``csv``."""
        self._printed = False
        """Whether totals were printed before."""
        self._printed_at = time.monotonic()
        """Monotonic time, in seconds, at which totals were printed last; before that, of the start."""

    def show(self, violations: list[Violation] | None) -> None:
        """Print what is due; ``violations`` is None in the middle of a reading."""
        lines = _findings(violations or [], self._format)
        first = not self._printed and violations is not None
        if first or self._tail.ended or time.monotonic() - self._printed_at >= LINE_SECONDS:
            lines += _totals(self._tail, self._format, first=not self._printed)
            self._printed, self._printed_at = True, time.monotonic()
        for line in lines:
            print(line, flush=True)


def _findings(violations: list[Violation], format: str) -> list[str]:
    if format == "json":
        return [_json("finding", finding(violation, None)) for violation in violations]
    return [] if format == "csv" else [_sentence(violation) for violation in violations]


def _totals(tail: LiveTail, format: str, *, first: bool) -> list[str]:
    if format == "json":
        return [_json("totals", tail.now()), *(_json("group", row) for row in tail.groups())]
    if format == "csv":
        return structs_csv(Now, [tail.now()]).splitlines()[0 if first else 1 :]
    groups = tail.groups()
    more = [f"  {_shown(len(groups))}"] if len(groups) > SHOWN_GROUPS else []
    return [line(tail.now()), *map(_group_line, groups[:SHOWN_GROUPS]), *more]


def _shown(groups: int) -> str:
    return f"{SHOWN_GROUPS} of {groups:,} groups shown"


def _group_line(row: GroupNow) -> str:
    hits = share(row.local + row.external, row.prompt_tokens)
    rate = "no prompt settled" if hits is None else f"{percent(hits)} hits"
    ended = counted(row.requests, "ended request")
    return f"  {row.group}: {ended}, {row.prompt_tokens:,} prompt tokens, {rate}"


def _json(kind: str, data: msgspec.Struct) -> str:
    return msgspec.json.encode({"kind": kind, **msgspec.to_builtins(data)}).decode()


def _until_ended(
    tail: LiveTail, wait: bool, poll_seconds: float, show: Callable[[list[Violation] | None], None]
) -> None:
    """Poll and show until every engine has ended."""
    ended, shown = False, time.monotonic()

    def tick() -> None:
        """Show progress: a journal with hours of events takes a while to read."""
        nonlocal shown
        if time.monotonic() - shown >= poll_seconds:
            shown = time.monotonic()
            show(None)

    while True:
        violations = tail.poll(tick)
        if violations or not (ended and tail.ended):
            show(violations)
        ended = tail.ended
        if ended and not wait:
            return
        time.sleep(poll_seconds)
