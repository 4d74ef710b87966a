"""Journals in a notebook: the answers of the commands that read journals.

    import kvledger

    audit = kvledger.Audit("trace", since="1h")
    audit.why(by="lora")

Every answer is displayed by the notebook, and has its figures as ``data``.
"""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from ..audit.analysis.whatif import Options
from ..audit.errors import LedgerError
from ..audit.replay.find import journals_at, named
from ..audit.replay.journals import audit_paths, statements
from ..audit.replay.observers import Lost, Steps
from ..audit.replay.parallel import Run
from ..audit.replay.windows import Window, window
from . import usage_logs
from .answer import Answer
from .inputs import reading
from .reports import audit, block_use, page, prefixes, statement, summary, turns, usage, whatif, why
from .reports.audit import AuditReport, report
from .reports.conclusions import concluded, explained_with
from .reports.costs import costs_of
from .terminal import PLAIN_WIDTH, rendered
from .trace.columns import TABLES

_BLOCK = '<pre style="white-space:pre;overflow-x:auto;line-height:1.3">{code}</pre>'

Choice = str | Path


class Shown(Answer):
    """An answer that a notebook displays as text."""

    def __repr__(self) -> str:
        return self._recorded().export_text().rstrip()

    def _repr_html_(self) -> str:
        return self._recorded().export_html(inline_styles=True, code_format=_BLOCK)

    def _recorded(self) -> Console:
        console = Console(
            record=True,
            width=PLAIN_WIDTH,
            file=io.StringIO(),
            highlight=False,
            force_jupyter=False,  # else rich displays what is recorded, too
        )
        console.print(rendered(self))
        return console


class Page:
    """The HTML report. A notebook displays it in a frame."""

    def __init__(self, html: str) -> None:
        self.html = html
        """The whole page."""

    def save(self, output: Choice) -> None:
        """Write the page to a file."""
        Path(output).write_text(self.html, encoding="utf-8")

    def _repr_html_(self) -> str:
        style = "width:100%;height:80vh;border:0"
        return f'<iframe srcdoc="{escape(self.html)}" style="{style}"></iframe>'


class Audit:
    """The journals at some paths.

    ``since`` and ``until`` are as for the commands: an ISO time, or a span before now such as ``1h``. Each
    method raises :class:`~kvledger.audit.errors.LedgerError` for a path that holds no journal.
    """

    def __init__(self, *paths: Choice, since: str = "", until: str = "") -> None:
        if not paths:
            raise LedgerError("Which journals? Audit takes at least one path.")
        self._paths = [named(Path(path)) for path in paths]
        self._window: Window = window(since, until)

    @cached_property
    def data(self) -> AuditReport:
        """The audit as data; read once."""
        with reading(self._paths) as (places, run):
            audited = audit_paths(places, (Lost, Steps), window=self._window, run=run)
            return concluded(report(audited, costs_of(audited.engines)))

    @property
    def verdict(self) -> str:
        """``clean``, ``violated`` or ``unknown``."""
        return self.data.verdict

    def summary(self, by: str = "", *, gpu_hour: float | None = None) -> Shown:
        """Totals, by group if ``by`` names groups, as for ``kvledger summary``."""
        with reading(self._paths) as (places, run):
            data = summary.summarize(
                places, by, window=self._window, run=run, with_costs=True, gpu_hour=gpu_hour
            )
        return Shown(*summary.answer(data))

    def why(self, by: str = "", *, gpu_hour: float | None = None) -> Shown:
        """Why prompt tokens missed the caches, as ``kvledger why``."""
        with reading(self._paths) as (places, run):
            data = why.why(places, window=self._window, run=run, gpu_hour=gpu_hour, by=by)
        return Shown(*why.answer(explained_with(data)))

    def show(self, request: str, *, every: bool = False) -> Shown:
        """The account of a request, or the requests of a call, by any id that its client knows."""
        with reading(self._paths) as (places, run):
            found = statements(places, request, window=self._window, run=run)
        if len(found) > 1:
            return Shown(*statement.answer_of_call(request, found))
        return Shown(*statement.answer(found[0], every_entry=every))

    def usage(self, log: Choice, *, verbose: bool = False) -> Shown:
        """What clients were told, as ``log`` says, beside the ledger, as ``kvledger check usage``."""
        told = usage_logs.read(Path(log))
        with reading(self._paths, local=True) as (places, _):
            data = usage.usage(journals_at(places), told, self._window)
        return Shown(*usage.answer(data, told, verbose=verbose))

    def whatif(self, blocks: str = "", *, tiers: str = "", skip: float = 0.0) -> Shown:
        """The hits of another number of blocks, with options written as for ``kvledger whatif``."""
        options = Options(blocks=whatif.counts(blocks), tiers=whatif.sizes(tiers), skip=skip)
        with reading(self._paths) as (places, run):
            data = whatif.study(places, options, window=self._window, run=run)
        return Shown(*whatif.answer(data))

    def prefixes(self, top: int = 20) -> Shown:
        """The shared prefixes for which the cache saved and lost most, as ``kvledger summary prefixes``."""
        with self._whole("prefixes") as (places, run):
            return Shown(*prefixes.answer(prefixes.prefixes(places, most=top, run=run)))

    def turns(self, session: str = "", *, worst: int = 20) -> Shown:
        """What turns of sessions missed of the turn before, as ``kvledger why turns``."""
        with reading(self._paths) as (places, run):
            data = turns.turns(places, session=session, most=worst, window=self._window, run=run)
        return Shown(*(turns.answer_of_session if session else turns.answer)(data))

    def blocks(self) -> Shown:
        """How blocks were used, as ``kvledger summary blocks``."""
        with self._whole("blocks") as (places, run):
            return Shown(*block_use.answer(block_use.block_use(places, run=run)))

    def _whole(self, name: str) -> AbstractContextManager[tuple[list[Path], Run]]:
        """The journals, for an answer that reads no part of them."""
        if self._window.bounded:
            raise LedgerError(f"{name} reads whole journals: leave since and until out.")
        return reading(self._paths)

    def frames(self, *names: str) -> Any:
        """The table of one name as a DataFrame; else a dictionary of the tables named, or of all tables.

        Needs the analysis extra.
        """
        try:
            from .trace import frames
        except ImportError as error:
            raise LedgerError(
                f"Tables need the analysis extra ({error}): pip install 'kvledger[analysis]'."
            ) from error
        found = frames.tables(self._paths, names or tuple(TABLES), self._window)
        return found[names[0]] if len(names) == 1 else found

    def report(self, output: Choice | None = None, *, by: str = "", gpu_hour: float | None = None) -> Page:
        """The HTML report, also written to ``output``, as ``kvledger export html``."""
        with reading(self._paths) as (places, run):
            data = page.gather(places, window=self._window, run=run, gpu_hour=gpu_hour, by=by)
        shown = Page(page.html(data))
        if output is not None:
            shown.save(output)
        return shown

    def __repr__(self) -> str:
        return repr(Shown(self.data, list(audit.sentences(self.data))))

    def _repr_html_(self) -> str:
        return Shown(*audit.answer(self.data))._repr_html_()
