"""What `kvledger check` finds in a vLLM server in which nothing of kvledger is installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from ...audit.analysis.contradictions import Contradiction, contradictions, relations
from ...audit.checks.figures import FIGURES
from ...audit.faults.listing import KnownFault, KnownOfRelease, of_release
from ...audit.release_semantics import meanings
from ...audit.text import printable
from ..served_engine import Server
from .faults import fault_sentence
from .terminal import VERDICTS, blocks, bullets, counted, figures_table, listed, percent, title

HOOKS_TELL = (
    "where the KV of each prompt token came from, and whether that KV was valid when it was read",
    "why tokens missed the prefix cache, and which work was lost to preemptions and failed loads",
    "what each request and tenant was told, and each second before its first token",
    "whether a known fault has shown here",
)
"""What an engine's own endpoints can't say."""

COUNTER = {row.figure: row.counter for figure in FIGURES for row in figure.compared}
SOURCE = {row.figure: row.source for figure in FIGURES for row in figure.compared if row.source}


class CheckedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of the server: its counters as they were read last, and how they grew meanwhile."""

    engine: str
    model: str
    counters: dict[str, float]
    grew: dict[str, float]
    contradictions: list[str]

    def share(self, hit: str, of: str) -> float | None:
        """The hit share of what was looked up; None: nothing was, or no counter says."""
        whole, part = self.counters.get(of), self.counters.get(hit)
        return part / whole if whole and part is not None else None


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. ``unknown``: why something can't be judged; empty if all could."""

    verdict: str
    url: str
    release: str
    models: list[str]
    settings: dict[str, Any]
    engines: list[CheckedEngine]
    unknown: list[str]
    faults: KnownOfRelease | None


def checked(server: Server) -> Checked:
    """Judge what a server said."""
    words = {figure: row.word for figure, row in meanings(server.release).items()}
    same = server.first.identity == server.second.identity
    engines = [
        CheckedEngine(
            engine=printable(engine.number),
            model=printable(engine.model),
            counters=last,
            grew={name: last[name] - first[name] for name in last.keys() & first.keys()} if same else {},
            contradictions=[_says(one) for one in contradictions(first, last, words)] if same else [],
        )
        for engine, last in sorted(server.second.engines.items())
        if (first := server.first.engines.get(engine)) is not None
    ]
    faults = of_release("vllm", server.release, server.settings) if server.release else None
    unknown = list(_unknown(server, same=same, engines=engines, words=words, faults=faults))
    violated = any(engine.contradictions for engine in engines)
    return Checked(
        verdict="violated" if violated else "unknown" if unknown else "clean",
        url=server.url,
        release=server.release,
        models=list(server.models),
        settings=server.settings,
        engines=engines,
        unknown=unknown,
        faults=faults,
    )


def _unknown(
    server: Server,
    *,
    same: bool,
    engines: Sequence[CheckedEngine],
    words: dict[str, str],
    faults: KnownOfRelease | None,
) -> Iterator[str]:
    if not same:
        yield "Two servers answer at this address, or the server restarted: check one by its own address."
    elif not engines:
        yield "No engine has counters there yet."
    if faults is None:
        yield "The server does not say its release, so no known fault and no sum of its figures is known."
    elif not faults.is_examined:
        yield faults.says
    for relation in relations(words) if same else ():
        figures = {*relation.figures, *relation.limits}
        if engines and not any(figures <= engine.grew.keys() for engine in engines):
            yield f"The server does not count {listed(sorted(map(_name, figures)))}."


def _name(figure: str) -> str:
    name, source = COUNTER[figure], SOURCE.get(figure)
    return f'{name}{{source="{source}"}}' if source else name


def _says(found: Contradiction) -> str:
    """``vllm:prefix_cache_hits_total is 12 and can't exceed vllm:prefix_cache_queries_total, later 10``."""
    names, limits = ([*map(_name, each)] for each in (found.figures, found.limits))
    if found.figures == found.limits:
        return f"{names[0]} fell from {found.sum:,.0f} to {found.limit:,.0f}."
    return (
        f"{' + '.join(names)} is {found.sum:,.0f}, and {' + '.join(limits)}, which can't be less, was "
        f"{found.limit:,.0f} a second later."
    )


# --- how it reads ---------------------------------------------------------------------------------------


def render(result: Checked) -> Group:
    """The verdict, contradictions, hit shares, known faults, and what only hooks can tell."""
    return blocks(
        _answer(result),
        _shares(result.engines),
        *_faults(result.faults),
        Group(
            title("What only hooks in the engine can tell"),
            *bullets(HOOKS_TELL),
            Text(
                "Install kvledger there and start the server with KVLEDGER_DIR=FOLDER to record it. An engine"
            ),
            Text("started with --kv-events-config publishes KV events: kvledger journals record-events"),
            Text("records them."),
        ),
    )


def _answer(result: Checked) -> Group:
    wrong = [f"engine {engine.engine}: {each}" for engine in result.engines for each in engine.contradictions]
    says = {
        "clean": "the counters agree with each other",
        "violated": f"{counted(len(wrong), 'contradiction')} between the engine's own counters",
        "unknown": "not everything can be judged",
    }[result.verdict]
    release = f"vLLM {result.release}" if result.release else "a vLLM of unknown release"
    models = f" with {listed(result.models)}" if result.models else ""
    known = ", ".join(
        "a connector" if name == "connector" else f"{name} {value}"
        for name, value in result.settings.items()
        if name != "v0"
    )
    return Group(
        Text.assemble((result.verdict, VERDICTS[result.verdict]), f": {says}."),
        Text(f"{result.url} is {release}{models}, {counted(len(result.engines), 'engine')}."),
        Text(f"Known of its configuration: {known or 'nothing'}. What else it has is not known."),
        *bullets([*wrong, *result.unknown]),
    )


def _shares(engines: Sequence[CheckedEngine]) -> RenderableType | None:
    if not engines:
        return None
    table = figures_table("engine", "local hits", "queried", "external hits", "queried", "prompt tokens")
    for engine in engines:
        cells = []
        for cache in ("local", "external"):
            share = engine.share(f"{cache}_hit_tokens", f"{cache}_queried_tokens")
            cells += [_share(share), _count(engine.counters.get(f"{cache}_queried_tokens"))]
        name = f"{engine.engine} {engine.model}".strip()
        table.add_row(Text(name), *cells, _count(engine.counters.get("prompt_tokens")))
    return Group(title("Hit share of the tokens that were looked up, since the start"), table)


def _share(share: float | None) -> str:
    return "-" if share is None else percent(share)


def _count(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}"


def _faults(known: KnownOfRelease | None) -> Iterator[RenderableType]:
    if known is None or not known.is_examined:
        return
    rows = known.of_kind("fault")
    here = [row for row in rows if row.state == "has" and not row.condition]
    maybe = [row for row in rows if row not in here]
    drifts = counted(len(known.of_kind("drift")), "drift")
    if here:
        yield _listed(f"{known.name} has {counted(len(here), 'known fault')} under this configuration", here)
    if maybe:
        yield _listed(
            f"{counted(len(maybe), 'more known fault' if here else 'known fault')} may apply", maybe
        )
    if not rows:
        yield Text(f"{known.name} has no known fault.")
    how_sure = f"{known.says} " if known.says else ""
    yield Text(
        f"{how_sure}kvledger doctor faults --vllm {known.release} has links, and {drifts} of figures.", "dim"
    )


def _listed(heading: str, rows: Sequence[KnownFault]) -> Group:
    return Group(title(heading), *bullets([fault_sentence(row) for row in rows]))
