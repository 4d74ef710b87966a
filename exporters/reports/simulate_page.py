"""The page of ``kvledger simulate``: each configuration drawn beside the recording."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ... import __version__
from ...audit.simulate.study import Outcome
from ..templating import environment
from .charts import Bar, bars
from .first_token import shown
from .html_page import TEMPLATES
from .simulate import Simulated, answer, named, remarks, tables
from .terminal import percent


class Drawn(NamedTuple):
    """A bar for each configuration."""

    title: str
    legend: str
    bars: list[Bar]


class _Figure(NamedTuple):
    """What is drawn: the value of a configuration (None: not known) and its text."""

    title: str
    legend: str
    value: Callable[[Outcome], float | None]
    text: Callable[[float], str]


FIGURES = (
    _Figure("Local hits", "Share of prompt tokens.", lambda one: one.hit_share, percent),
    _Figure("Preemptions", "Of running requests.", lambda one: one.preemptions, "{:,.0f}".format),
    _Figure(
        "Time to first token",
        "95th percentile.",
        lambda one: one.first_token_p95,
        lambda seconds: shown(1e3 * seconds),
    ),
    _Figure("Engine seconds", "In which a step ran.", lambda one: one.engine_seconds, "{:,.1f} s".format),
)
"""The figures that are drawn."""


def html(one: Simulated) -> str:
    """Render the page, which loads nothing from the network."""
    template = environment(TEMPLATES).get_template("simulate.html.j2")
    return template.render(
        engine=one.engine,
        trusted=one.trusted,
        answer=[line.plain for line in answer(one)],
        drawn=list(drawn(one)),
        tables=tables(one),
        remarks=list(remarks(one)),
        version=__version__,
    )


def drawn(one: Simulated) -> Iterator[Drawn]:
    """A chart for each figure that is known of any configuration and not 0 in all."""
    for figure in FIGURES:
        values = [(named(each), figure.value(each)) for each in one.outcomes]
        rows = [(name, value, figure.text(value)) for name, value in values if value is not None]
        if any(value for _, value, _ in rows):
            yield Drawn(figure.title, figure.legend, bars(rows))
