"""What `kvledger check` finds in a server of vLLM or SGLang in which nothing of kvledger is installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ...audit.analysis.hit_reasons import Probe, Reason, reasons, share
from ...audit.analysis.usage import Contradiction, contradictions, relations
from ...audit.faults.catalogue import KnownOfRelease, of_release
from ...audit.release_semantics import CONTRACTS, Product, meanings, servers
from ...audit.text import printable
from ..answer import DIM, DOUBT, Answer, Lines, Part, Table, Words, counted, listed
from ..http_client import shown
from ..served_engine import Server, outside
from .faults import fault_sentence

HOOKS_TELL = (
    "where the KV of each prompt token came from, and whether that KV was valid when it was read",
    "why tokens missed the prefix cache, and which work was lost to preemptions and failed loads",
    "what each request and tenant was told, and each second before its first token",
    "whether a known fault has shown here",
)
"""What an engine's own endpoints can't say."""

COUNTERS: dict[Product, dict[str, str]] = {
    product: {
        **{
            figure: f'{name}{{source="{source}"}}' if source else name
            for (name, source), figure in server.counters.items()
        },
        **{figure: name for name, figure in server.summed.items()},
    }
    for product, server in servers().items()
}
"""The counter of each figure, by product."""


class CheckedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of the server: its counters as they were read last, and how they grew meanwhile."""

    engine: str
    model: str
    counters: dict[str, float]
    grew: dict[str, float]
    contradictions: list[str]
    hit_share: float | None
    """Of the looked-up prompt tokens; None: none was looked up."""
    reasons: list[Reason]
    """Why so few hit; empty where enough do."""

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
    probe: Probe | None
    product: Product


def checked(server: Server) -> Checked:
    """Judge what a server said."""
    product = server.first.product
    words = {figure: row.word for figure, row in meanings(server.release, engine=product).items()}
    same = server.first.identity == server.second.identity
    engines = [
        CheckedEngine(
            engine=printable(engine.number),
            model=printable(engine.model),
            counters=last,
            grew={name: last[name] - first[name] for name in last.keys() & first.keys()} if same else {},
            contradictions=[_says(one, product) for one in contradictions(first, last, words, product)]
            if same
            else [],
            hit_share=share(told := outside(server, engine)),
            reasons=reasons(told, server.probe),
        )
        for engine, last in sorted(server.second.engines.items())
        if (first := server.first.engines.get(engine)) is not None
    ]
    faults = of_release(product, server.release, server.settings) if server.release else None
    unknown = list(_unknown(server, same=same, engines=engines, words=words, faults=faults))
    violated = any(engine.contradictions for engine in engines)
    return Checked(
        verdict="violated" if violated else "unknown" if unknown else "clean",
        url=shown(server.url),
        release=server.release,
        models=list(server.models),
        settings=server.settings,
        engines=engines,
        unknown=unknown,
        faults=faults,
        probe=server.probe,
        product=product,
    )


def _unknown(
    server: Server,
    *,
    same: bool,
    engines: Sequence[CheckedEngine],
    words: dict[str, str],
    faults: KnownOfRelease | None,
) -> Iterator[str]:
    if server.unprobed:
        yield server.unprobed
    if not same:
        yield "Two servers answer at this address, or the server restarted: check one by its own address."
    elif not engines:
        yield "No engine has counters there yet."
    if faults is None:
        yield "The server does not say its release, so no known fault and no sum of its figures is known."
    elif not faults.is_examined:
        yield faults.says
    for relation in relations(words, server.first.product) if same else ():
        figures = {*relation.figures, *relation.limits}
        if engines and not any(figures <= engine.grew.keys() for engine in engines):
            names = sorted(COUNTERS[server.first.product][each] for each in figures)
            yield f"The server does not count {listed(names)}."


def _says(found: Contradiction, product: Product) -> str:
    """``vllm:prefix_cache_hits_total is 12 and can't exceed vllm:prefix_cache_queries_total, later 10``."""
    names, limits = ([COUNTERS[product][figure] for figure in each] for each in (found.figures, found.limits))
    if found.figures == found.limits:
        return f"{names[0]} fell from {found.sum:,.0f} to {found.limit:,.0f}."
    return (
        f"{' + '.join(names)} is {found.sum:,.0f}, and {' + '.join(limits)}, which can't be less, was "
        f"{found.limit:,.0f} a second later."
    )


# --- the answer -----------------------------------------------------------------------------------------


def answer(result: Checked) -> Answer:
    """The verdict, contradictions, hit shares, known faults, and what only hooks can tell."""
    if servers()[result.product].at_end:
        return Answer(result, list(_sentences(result)), [_of_ended(result), *_faults(result.faults)])
    names = [
        f"{cache}_{what}" for cache in ("local", "external") for what in ("hit_tokens", "queried_tokens")
    ]
    shares = []
    for engine in result.engines:
        local, external = (engine.share(*names[:2]), engine.share(*names[2:]))
        counts = [engine.counters.get(name) for name in (names[1], names[3], "prompt_tokens")]
        shares.append((f"{engine.engine} {engine.model}".strip(), local, counts[0], external, *counts[1:]))
    columns = "local hits:% | queried:,.0f | external hits:% | queried:,.0f | prompt tokens:,.0f"
    hooks = (
        "Install kvledger there and start the server with KVLEDGER_DIR=FOLDER to record it. An engine "
        "started with --kv-events-config publishes KV events: kvledger journals record-events records them."
    )
    return Answer(
        result,
        list(_sentences(result)),
        [
            Table(
                shares, f"engine | {columns}", "Hit share of the tokens that were looked up, since the start"
            ),
            *_faults(result.faults),
            Lines([*(f"- {each}" for each in HOOKS_TELL), hooks], "What only hooks in the engine can tell"),
        ],
    )


def _of_ended(result: Checked) -> Table:
    rows = [
        (
            f"{engine.engine} {engine.model}".strip(),
            engine.share("cached_tokens", "prompt_tokens"),
            *(engine.counters.get(name) for name in ("prompt_tokens", "output_tokens", "requests")),
        )
        for engine in result.engines
    ]
    columns = "engine | cached:% | prompt tokens:,.0f | output tokens:,.0f | requests:,.0f"
    return Table(rows, columns, "Of the requests that ended since the start")


def _sentences(result: Checked) -> Iterator[str]:
    wrong = [f"engine {engine.engine}: {each}" for engine in result.engines for each in engine.contradictions]
    says = {
        "clean": "the counters agree with each other",
        "violated": f"{counted(len(wrong), 'contradiction')} between the engine's own counters",
        "unknown": "not everything can be judged",
    }[result.verdict]
    product = CONTRACTS[result.product].name
    release = f"{product} {result.release}" if result.release else f"{product} of unknown release"
    models = f" with {listed(result.models)}" if result.models else ""
    known = ", ".join(
        "a connector" if name == "connector" else f"{name} {value}"
        for name, value in result.settings.items()
        if name != "v0"
    )
    yield f"{result.verdict}: {says}. {_hits(result)}".rstrip()
    yield f"{result.url} is {release}{models}, {counted(len(result.engines), 'engine')}."
    yield f"Known of its configuration: {known or 'nothing'}. What else it has is not known."
    yield from (f"- {each}" for each in (*wrong, *result.unknown))
    for says, do in dict.fromkeys(
        (each.says, each.do) for engine in result.engines for each in engine.reasons
    ):
        yield Words(f"- {says} {do}", DOUBT)


def _hits(result: Checked) -> str:
    """``0.3 % of the prompt tokens hit. Prefix caching is off.``"""
    shares = [f"{100 * each.hit_share:.1f} %" for each in result.engines if each.hit_share is not None]
    first = next((each.says for engine in result.engines for each in engine.reasons), "")
    if not result.engines:
        return ""
    hit = (
        f"{listed(shares)} of the prompt tokens hit" if shares else "No lookup of the prefix cache is counted"
    )
    return f"{hit}. {first}"


def _faults(known: KnownOfRelease | None) -> Iterator[Part]:
    if known is None or not known.is_examined:
        return
    rows = known.of_kind("fault")
    here = [row for row in rows if row.state == "has" and not row.condition]
    maybe = [row for row in rows if row not in here]
    drifts = counted(len(known.of_kind("drift")), "drift")
    has = f"{known.name} has {counted(len(here), 'known fault')} under this configuration"
    may = f"{counted(len(maybe), 'more known fault' if here else 'known fault')} may apply"
    yield Lines([f"- {fault_sentence(row)}" for row in here], has)
    yield Lines([f"- {fault_sentence(row)}" for row in maybe], may)
    how_sure = f"{known.says} " if known.says else ""
    command = f"kvledger doctor faults --{known.product} {known.release}"
    links = f"{how_sure}{command} has links, and {drifts} of figures."
    yield Lines([*([] if rows else [f"{known.name} has no known fault."]), Words(links, DIM)])
