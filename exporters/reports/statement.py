"""The account statement of one request, in the manner of a bank statement.

Entry by entry: number, time, step, life, text, debit, credit, balance; then the figures that were
settled. Runs of like entries are folded into one line unless all are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...audit.ledger.frozen import AccountStatement, Line, Settlement
from ...audit.replay.journals import RequestStatement
from . import terminal
from .audit import finding

FOLD = 3
"""So many like entries in a row, or more, become one line."""

_LEGEND = (
    "A life lasts from an admission to a preemption or the end; the balance is the tokens whose KV "
    "it has, or is about to have."
)


def statement(request: RequestStatement, *, every_entry: bool = False, findings: bool = True) -> Group:
    """The whole statement, drawn; with what was found in this request unless told otherwise."""
    account = request.account
    parts: list[RenderableType] = [*_head(request), Text(), _table(request.lines, every_entry)]
    parts += [Text(), *(_settled(account))]
    found = terminal.findings([finding(violation) for violation in request.findings])
    if found is not None and findings:
        parts += [Text(), found]
    return Group(*parts)


def _head(request: RequestStatement) -> Iterator[Text]:
    account = request.account
    yield Text.assemble(("Account of ", "bold"), (account.request_id, "bold"), f"   {request.engine}")
    closed = f"{account.closed_at / 1e6:.3f} s" if account.closed_at >= 0 else "still open"
    yield Text(
        f"{terminal.counted(account.prompt_tokens, 'prompt token')}, opened {account.added_at / 1e6:.3f} s, "
        f"closed {closed}{f' ({account.outcome})' if account.outcome else ''}, "
        f"{_lives(len(account.lives))}, "
        f"{terminal.counted(account.preemptions, 'preemption')}"
    )
    yield Text(_LEGEND, style="dim")
    if account.unknown is not None:
        yield Text(f"Unknown: {account.unknown}. Figures are as far as seen.", style="yellow")


def _lives(n: int) -> str:
    return "1 life" if n == 1 else f"{n} lives"


def _table(lines: list[Line], every_entry: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("entry", "seconds", "step", "life"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("text", min_width=20)
    for name in ("debit", "credit", "balance"):
        table.add_column(name, justify="right", no_wrap=True)
    life = 0
    for run in _runs(lines):
        if life and run[0].life != life:
            table.add_section()
            table.add_row()
        life = run[0].life
        if every_entry or len(run) < FOLD:
            for line in run:
                _add(table, line, line.text)
        else:
            _add(table, _folded(run), f"{run[0].text}, {len(run)} times to step {run[-1].step}")
    return table


def _runs(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """Consecutive lines that differ in nothing but when, and in the balance."""
    run: list[Line] = []
    for line in lines:
        if run and _kind(line) != _kind(run[0]):
            yield run
            run = []
        run.append(line)
    if run:
        yield run


def _kind(line: Line) -> tuple[object, ...]:
    return (line.life, line.text, line.credit, line.debit)


def _folded(run: list[Line]) -> Line:
    return run[0]._replace(
        credit=sum(line.credit for line in run),
        debit=sum(line.debit for line in run),
        balance=run[-1].balance,
    )


def _add(table: Table, line: Line, text: str) -> None:
    table.add_row(
        str(line.number),
        f"{line.at / 1e6:.3f}",
        str(line.step),
        str(line.life) if line.life else "",
        Text(text, style="" if line.credit or line.debit else "dim"),
        f"{line.debit:,}" if line.debit else "",
        f"{line.credit:,}" if line.credit else "",
        f"{line.balance:,}",
        style="" if line.balance >= 0 else "bold red",
    )


def _settled(account: AccountStatement) -> Iterator[RenderableType]:
    """The closing figures: sources beside plan and report, and the work."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("prompt tokens", min_width=24)
    for name in ("local", "external", "computed", "unattained"):
        table.add_column(name, justify="right", no_wrap=True)
    for place, settlement in enumerate(account.settlements):
        _settlement_row(table, settlement, place)
    if account.plan is not None:
        prompt = (account.settled or account).prompt_tokens
        local, external = account.plan
        _figures_row(table, "plan", (local, external, prompt - local - external))
    if account.reported is not None:
        _figures_row(table, "reported by the engine", account.reported)
    yield table
    rework = sum(account.rework.values())
    parts = (
        ("first prompt", account.first_prompt),
        ("first output", account.first_output),
        ("rework", rework),
        ("rejected", account.rejected),
        ("overrun", account.overrun),
    )
    shown = " + ".join(f"{tokens:,} {name}" for name, tokens in parts)
    yield Text(f"\n{account.scheduled:,} tokens scheduled = {shown}")
    again = f"{account.hit_again:,} tokens hit again, {account.loaded_again:,} loaded again"
    if account.hit_again or account.loaded_again:
        yield Text(f"{again} over tokens that had come to be before")


def _settlement_row(table: Table, settlement: Settlement, place: int) -> None:
    label = f"settled, step {settlement.step}" if place == 0 else f"settled, chunk {place + 1}"
    figures = (settlement.local, settlement.external, settlement.computed, settlement.unattained)
    _figures_row(table, label, figures, style="bold")


def _figures_row(table: Table, label: str, figures: tuple[int, ...], style: str = "") -> None:
    table.add_row(label, *(f"{tokens:,}" for tokens in figures), style=style)
