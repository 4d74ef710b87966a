"""Journals in a notebook: the answers of ``audit``, ``summary``, ``why``, ``report`` and ``export``.

    import kvledger

    audit = kvledger.Audit("trace", since="1h")
    audit.why(by="lora")

Every answer is displayed by the notebook, and has its figures as ``data``.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from ..audit.errors import LedgerError
from ..audit.replay.journals import audit_paths
from ..audit.replay.observers import Lost, Steps
from ..audit.replay.windows import Window, window
from .inputs import reading
from .reports import audit_text, html_page, summary, why
from .reports.audit_data import AuditReport, report
from .reports.conclusions import concluded, explained_with
from .reports.costs import costs_of
from .reports.terminal import PLAIN_WIDTH
from .trace.columns import TABLES

_BLOCK = '<pre style="white-space:pre;overflow-x:auto;line-height:1.3">{code}</pre>'

Choice = str | Path


class Answer:
    """What a command prints, and its figures as ``data``."""

    def __init__(self, data: Any, render: Callable[[Any], RenderableType]) -> None:
        self.data = data
        self._render = render
        """Turns ``data`` into what is printed."""

    def __repr__(self) -> str:
        return self._recorded().export_text().rstrip()

    def _repr_html_(self) -> str:
        return self._recorded().export_html(inline_styles=True, code_format=_BLOCK)

    def _recorded(self) -> Console:
        console = Console(record=True, width=PLAIN_WIDTH, file=io.StringIO(), highlight=False)
        console.print(self._render(self.data))
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
        self._paths = [Path(path) for path in paths]
        """The paths, as they were given."""
        self._window: Window = window(since, until)
        """The time window of every answer."""

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

    def summary(self, by: str = "", *, gpu_hour: float | None = None) -> Answer:
        """Totals, by group if ``by`` names groups, as for ``kvledger summary``."""
        with reading(self._paths) as (places, run):
            data = summary.summarize(
                places, by, window=self._window, run=run, with_costs=True, gpu_hour=gpu_hour
            )
        return Answer(data, summary.render)

    def why(self, by: str = "", *, gpu_hour: float | None = None) -> Answer:
        """Why prompt tokens missed the caches, as ``kvledger why``."""
        with reading(self._paths) as (places, run):
            data = why.why(places, window=self._window, run=run, gpu_hour=gpu_hour, by=by)
        return Answer(explained_with(data), why.render)

    def frames(self, *names: str) -> dict[str, Any]:
        """The tables of these names as DataFrames; all tables if none is named. Needs the analysis extra."""
        try:
            from .trace import frames
        except ImportError as error:
            raise LedgerError(
                f"Tables need the analysis extra ({error}): pip install 'kvledger[analysis]'."
            ) from error
        return frames.tables(self._paths, names or tuple(TABLES), self._window)

    def report(self, output: Choice | None = None, *, by: str = "", gpu_hour: float | None = None) -> Page:
        """The HTML report, also written to ``output``, as ``kvledger report``."""
        with reading(self._paths) as (places, run):
            data = html_page.gather(places, window=self._window, run=run, gpu_hour=gpu_hour, by=by)
        page = Page(html_page.html(data))
        if output is not None:
            page.save(output)
        return page

    def __repr__(self) -> str:
        return repr(Answer(self.data, audit_text.answer))

    def _repr_html_(self) -> str:
        return Answer(self.data, audit_text.render)._repr_html_()
