"""Audits in a notebook: of journals, and of an engine that is attached.

    import kvledger

    audit = kvledger.Audit("trace", since="1h")
    audit.why(by="lora")

    with kvledger.attach(llm) as audit:
        llm.generate(prompts)
    audit.why()

Both have the same verdict, findings, totals and accounts, and the same answers, which are those of the
commands. Every answer is displayed by the notebook, and has its figures as ``data``.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..audit import temporary
from ..audit.checks.auditor import Found, Listed, Verdict
from ..audit.checks.coverage import Coverage, count_words, verdict_words
from ..audit.checks.registry import Violation
from ..audit.entry.attach import LiveAudit, attached
from ..audit.errors import LedgerError, missing
from ..audit.figures.totals import Totals
from ..audit.ledger.account import AccountStatement
from ..audit.replay.find import journals_at, named
from ..audit.replay.journals import Audit as AuditOfJournals
from ..audit.replay.journals import audit_paths, statement, statements
from ..audit.replay.observers import Lost, Steps
from ..audit.replay.parallel import Run
from ..audit.replay.windows import EVERYTHING, Window, window
from .answer import Answer

if TYPE_CHECKING:
    from rich.console import Console

    from .reports.audit import AuditReport

_BLOCK = '<pre style="white-space:pre;overflow-x:auto;line-height:1.3">{code}</pre>'

Choice = str | Path


class Shown(Answer):
    """An answer that a notebook displays as text."""

    def __repr__(self) -> str:
        return self._recorded().export_text().rstrip()

    def _repr_html_(self) -> str:
        return self._recorded().export_html(inline_styles=True, code_format=_BLOCK)

    def _recorded(self) -> Console:
        from rich.console import Console

        from .terminal import PLAIN_WIDTH, rendered

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

    def save(self, output: Choice) -> Path:
        """Write the page to a file; returns its path."""
        Path(output).write_text(self.html, encoding="utf-8")
        return Path(output)

    def _repr_html_(self) -> str:
        style = "width:100%;height:80vh;border:0"
        return f'<iframe srcdoc="{escape(self.html)}" style="{style}"></iframe>'


class Answers(ABC):
    """What the commands answer of an audit. Each raises :class:`LedgerError` for what can't be read."""

    _window: Window = EVERYTHING

    @abstractmethod
    def _journals(self, *, local: bool = False) -> AbstractContextManager[tuple[list[Path], Run]]:
        """The journals to read, and how."""

    @contextmanager
    def _reading(self, *, local: bool = False) -> Iterator[tuple[list[Path], Run]]:
        try:
            with self._journals(local=local) as both:
                yield both
        except ModuleNotFoundError as error:
            raise missing(error, "This answer") from error

    def _audited(self) -> AuditOfJournals:
        with self._reading() as (places, run):
            return audit_paths(places, (Lost, Steps), window=self._window, run=run)

    def _report(self) -> AuditReport:
        from .reports.audit import report
        from .reports.conclusions import concluded
        from .reports.costs import costs_of

        audited = self._audited()
        return concluded(report(audited, costs_of(audited.engines)))

    def summary(self, by: str = "", *, gpu_hour: float | None = None) -> Shown:
        """Totals, by group if ``by`` names groups, as for ``kvledger summary``."""
        with self._reading() as (places, run):
            from .reports import summary

            data = summary.summarize(
                places, by, window=self._window, run=run, with_costs=True, gpu_hour=gpu_hour
            )
            return Shown(*summary.answer(data))

    def why(self, by: str = "", *, gpu_hour: float | None = None) -> Shown:
        """Why prompt tokens missed the caches, as ``kvledger why``."""
        with self._reading() as (places, run):
            from .reports import why
            from .reports.conclusions import explained_with

            data = why.why(places, window=self._window, run=run, gpu_hour=gpu_hour, by=by)
            return Shown(*why.answer(explained_with(data)))

    def show(self, request: str, *, every: bool = False) -> Shown:
        """The account of a request, or the requests of a call, by any id that its client knows."""
        from .reports import statement as report

        with self._reading() as (places, run):
            found = statements(places, request, window=self._window, run=run)
        if len(found) > 1:
            return Shown(*report.answer_of_call(request, found))
        return Shown(*report.answer(found[0], every_entry=every))

    def usage(self, log: Choice, *, tenant: str = "", verbose: bool = False) -> Shown:
        """What clients were told, as ``log`` says, beside the ledger, as ``kvledger check usage``."""
        from . import usage_logs
        from .reports import usage

        told = usage_logs.read(Path(log), tenant)
        with self._reading(local=True) as (places, _):
            data = usage.usage(journals_at(places), told, self._window)
        return Shown(*usage.answer(data, told, verbose=verbose))

    def whatif(self, blocks: str = "", *, tiers: str = "", skip: float = 0.0) -> Shown:
        """The hits of another number of blocks, with options written as for ``kvledger whatif``.

        Level blocks only.
        """
        with self._reading() as (places, run):
            from ..audit.analysis.whatif import Options
            from .reports import whatif

            options = Options(blocks=whatif.counts(blocks), tiers=whatif.sizes(tiers), skip=skip)
            return Shown(*whatif.answer(whatif.study(places, options, window=self._window, run=run)))

    def prefixes(self, top: int = 20) -> Shown:
        """The shared prefixes for which the cache saved and lost most, as ``kvledger summary prefixes``.

        Level blocks only.
        """
        with self._whole("prefixes") as (places, run):
            from .reports import block_use

            return Shown(*block_use.prefixes_answer(block_use.prefixes(places, most=top, run=run)))

    def turns(self, session: str = "", *, worst: int = 20) -> Shown:
        """What turns of sessions missed of the turn before, as ``kvledger why turns``. Level blocks only."""
        with self._reading() as (places, run):
            from .reports import turns

            data = turns.turns(places, session=session, most=worst, window=self._window, run=run)
            return Shown(*(turns.answer_of_session if session else turns.answer)(data))

    def blocks(self) -> Shown:
        """How blocks were used, as ``kvledger summary blocks``. Level blocks only."""
        with self._whole("blocks") as (places, run):
            from .reports import block_use

            return Shown(*block_use.answer(block_use.block_use(places, run=run)))

    def _whole(self, name: str) -> AbstractContextManager[tuple[list[Path], Run]]:
        """The journals, for an answer that reads no part of them."""
        if self._window.bounded:
            raise LedgerError(f"{name} reads whole journals: leave since and until out.")
        return self._reading()

    def frames(self, *names: str) -> Any:
        """The table of one name as a DataFrame; else a dictionary of the tables named, or of all tables."""
        with self._reading() as (places, _):
            from .trace import frames
            from .trace.columns import TABLES

            found = frames.tables(places, names or tuple(TABLES), self._window)
        return found[names[0]] if len(names) == 1 else found

    def report(self, output: Choice | None = None, *, by: str = "", gpu_hour: float | None = None) -> Page:
        """The HTML report, also written to ``output``, as ``kvledger export html``."""
        with self._reading() as (places, run):
            from .reports import page

            data = page.gather(places, window=self._window, run=run, gpu_hour=gpu_hour, by=by)
            shown = Page(page.html(data))
        if output is not None:
            shown.save(output)
        return shown

    def _repr_html_(self) -> str:
        from .reports import audit

        return Shown(*audit.answer(self._report()))._repr_html_()


class Audit(Listed, Answers):
    """The journals at some paths.

    ``since`` and ``until`` are as for the commands: an ISO time, or a span before now such as ``1h``. Raises
    :class:`~kvledger.audit.errors.LedgerError`, as each method does for a path that holds no journal.
    """

    def __init__(self, *paths: Choice, since: str = "", until: str = "") -> None:
        if not paths:
            raise LedgerError("Which journals? Audit takes at least one path.")
        self._paths = [named(Path(path)) for path in paths]
        self._window = window(since, until)

    def _journals(self, *, local: bool = False) -> AbstractContextManager[tuple[list[Path], Run]]:
        from .inputs import reading

        return reading(self._paths, local=local)

    @cached_property
    def _read(self) -> AuditOfJournals:
        return super()._audited()

    def _audited(self) -> AuditOfJournals:
        return self._read

    @cached_property
    def data(self) -> AuditReport:
        """The audit as data; read once."""
        return self._report()

    @property
    def verdict(self) -> Verdict:
        """``clean``, ``violated`` or ``unknown``."""
        return self._read.verdict

    def _findings(self) -> list[Violation]:
        return self._read.violations

    @property
    def found(self) -> list[Found]:
        """How many findings each invariant has; exact also where the two lists are cut."""
        return self._read.found

    @property
    def coverage(self) -> Coverage:
        """What was examined, and what was not."""
        return self._read.coverage

    @property
    def totals(self) -> Totals:
        """Sums over all accounts."""
        return self._read.totals

    def account(self, request_id: str) -> AccountStatement:
        """The account statement of one request, by any id that its client knows.

        Raises LedgerError if no request has that name, or several have, as the samples of a call.
        """
        with self._reading() as (places, run):
            return statement(places, request_id, window=self._window, run=run).account

    def __repr__(self) -> str:
        return f"{verdict_words(self.verdict, self.coverage)}. {count_words(self.found)}"


class AttachedAudit(LiveAudit, Answers):
    """An attached engine with the answers of the commands, from a temporary journal of its events so far."""

    @contextmanager
    def _journals(self, *, local: bool = False) -> Iterator[tuple[list[Path], Run]]:
        from .inputs import reading

        with temporary.folder() as folder:
            writer = self._write(Path(folder, "attached"))
            try:  # while the writer holds the journal, the engine counts as running
                with reading([writer.folder], local=local) as both:
                    yield both
            finally:
                writer.close()


def attach(
    target: object, *, strict: bool = False, level: str = "tokens", stacks: bool = False
) -> AttachedAudit:
    """Audit a ``Scheduler``, ``EngineCore``, ``LLMEngine`` or ``LLM`` of vLLM, or a ``Scheduler`` of SGLang.

    The arguments are those of :func:`kvledger.audit.entry.attach.attach`. Raises
    :class:`~kvledger.audit.errors.LedgerError` if the scheduler runs in another process or is of an unknown
    release.
    """
    return attached(AttachedAudit, target, strict=strict, level=level, stacks=stacks)
