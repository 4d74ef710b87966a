"""The engines' own figures in words: what each metric and usage field counts, and which of ours is beside it.

``engine_metrics.json`` has them; `kvledger explain` and docs/engine-metrics.md print them. What single
releases count wrongly is in ``figures.py``.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from importlib import resources

import msgspec

from .figures import FIGURES, Deviation

SERIES = re.compile(r"(_total)?(_bucket|_sum|_count|_created)?$")
"""What Prometheus appends to the name of a family."""


class EngineFigure(msgspec.Struct, frozen=True):
    """Figures that count alike. ``ours``: what stands beside them; ``why``: why that differs."""

    names: list[str]
    says: str
    misses: str = ""
    ours: str = ""
    why: str = ""


class Disagreement(msgspec.Struct, frozen=True):
    """Two figures that look as if they had to be equal."""

    names: list[str]
    why: str


class EngineMetrics(msgspec.Struct, frozen=True):
    """All figures. ``examined``: the releases whose families were compared with these, by product.

    ``since``: of what the first of these releases does not have, the first that has it.
    """

    examined: dict[str, list[str]]
    since: dict[str, str]
    disagree: list[Disagreement]
    figures: list[EngineFigure]


@cache
def engine_metrics() -> EngineMetrics:
    """The figures, as the file has them."""
    file = resources.files(__package__).joinpath("engine_metrics.json")
    return msgspec.json.decode(file.read_bytes(), type=EngineMetrics)


def named(name: str) -> EngineFigure | None:
    """The figure of this name, also as Prometheus shows it: ``vllm:prompt_tokens_total``, ``..._bucket``."""
    family = SERIES.sub("", name)
    spellings = {name, family, f"{family}_total"}
    return next((row for row in engine_metrics().figures if spellings & {*row.names}), None)


def explain(figure: EngineFigure) -> str:
    """A figure for a terminal, with what releases count wrongly."""
    parts = [", ".join(figure.names), figure.says]
    parts += [f"Leaves out: {figure.misses}"] if figure.misses else []
    if figure.ours:
        ours = "no figure of kvledger" if figure.ours == "none" else figure.ours
        parts.append(f"Beside it: {ours}. {figure.why}".strip())
    since = engine_metrics().since
    parts += [f"Since vLLM {since[name]}: {name}." for name in figure.names if name in since]
    drifts = [f"- {row.counts} ({row.releases})" for row in _deviations(figure)]
    parts += ["What releases count instead:", *drifts] if drifts else []
    return "\n".join(
        textwrap.fill(each, 80, break_long_words=False, break_on_hyphens=False) for each in parts
    )


def _deviations(figure: EngineFigure) -> list[Deviation]:
    found = (
        row
        for each in FIGURES
        if any(fnmatch(name, pattern) for name in figure.names for pattern in each.names)
        for row in each.deviations
    )
    return list(dict.fromkeys(found))


# --- the page -------------------------------------------------------------------------------------------

_HEAD = """\
# These metrics disagree, and here is why

What the engines' own metrics and the `usage` of their answers count, when, what they leave out, and which
figure of kvledger is beside each. `kvledger explain NAME` prints one. [Reconciliation](reconciliation.md) has
what single releases count wrongly. {examined}

## Two figures that look as if they had to be equal

| these | differ because |
|---|---|
"""

_SECTIONS = {
    "vllm:": "vLLM",
    "vLLM": "vLLM's log",
    "sglang:": "SGLang",
    "lmcache:": "LMCache",
    "usage.": "Usage in answers",
}


def markdown() -> str:
    """docs/engine-metrics.md."""
    return _HEAD.format(examined=_examined()) + "\n".join(_lines()) + "\n"


def _examined() -> str:
    wheels = {
        name: ", ".join(engine_metrics().examined[name.casefold()]) for name in ("vLLM", "SGLang", "LMCache")
    }
    registered = ", ".join(f"{name} {releases}" for name, releases in wheels.items())
    return (
        f"The families are those\nthat the wheels of {registered} register; a release in "
        "brackets\nis the first of these that has the family."
    )


def _lines() -> Iterator[str]:
    data = engine_metrics()
    for row in data.disagree:
        yield f"| {', '.join(map(_code, row.names))} | {row.why} |"
    for prefix, title in _SECTIONS.items():
        yield f"\n## {title}\n"
        yield "| figure | counts | leaves out | beside it |"
        yield "|---|---|---|---|"
        for figure in data.figures:
            if figure.names[0].startswith(prefix):
                names = ", ".join(map(_named, figure.names))
                yield f"| {names} | {figure.says} | {figure.misses} | {_beside(figure)} |"


def _named(name: str) -> str:
    release = engine_metrics().since.get(name)
    return _code(name) + (f" ({release})" if release else "")


def _code(name: str) -> str:
    return name if " " in name else f"`{name}`"


def _beside(figure: EngineFigure) -> str:
    ours = re.sub(r"kvledger_\w+(\{[^}]*\})?", lambda found: f"`{found[0]}`", figure.ours)
    return f"{ours}. {figure.why}" if figure.why else ours
