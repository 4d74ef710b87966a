"""Which of an engine's own counters contradict each other, in two scrapes of its metrics.

Nothing here needs the ledger. Traffic does not stop while an engine answers, so no two counters are of one
instant. But counters only grow: what must not exceed another figure may not exceed it as it was read later.
So only what holds under every order of reading is a contradiction, and a small one can stay hidden while
requests run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..release_semantics import sources_add_up

Figures = Mapping[str, float]
"""An engine's counters in one scrape, by figure."""

SOURCES = ("local_tokens", "external_tokens", "computed_tokens")


class Contradiction(NamedTuple):
    """The sum of some figures is more than that of others, which were read later and can't be less.

    ``limits`` are the ``figures`` themselves where a counter fell.
    """

    figures: tuple[str, ...]
    sum: float
    limits: tuple[str, ...]
    limit: float


class Relation(NamedTuple):
    """The sum of ``figures`` is at most that of ``limits``; the same, if ``equal``."""

    figures: tuple[str, ...]
    limits: tuple[str, ...]
    equal: bool = False


LOOKUPS = (
    Relation(("local_hit_tokens",), ("local_queried_tokens",)),
    Relation(("external_hit_tokens",), ("external_queried_tokens",)),
)
PROMPTS = (
    Relation(SOURCES, ("prompt_tokens",), equal=True),
    Relation(("local_tokens", "external_tokens"), ("cached_tokens",), equal=True),
)

SGLANG = (
    Relation(("cached_tokens",), ("prompt_tokens",)),
    Relation(("cached_tokens", "computed_tokens"), ("prompt_tokens",), equal=True),
)
OUTPUTS = Relation(("ended_output_tokens",), ("output_tokens",))
"""The outputs of ended requests are among all outputs."""


def relations(words: Mapping[str, str], product: str = "vllm") -> tuple[Relation, ...]:
    """What must hold in a release of an engine: ``words`` say what its figures mean."""
    if product == "sglang":
        return SGLANG
    return (*LOOKUPS, *PROMPTS) if sources_add_up(words) else LOOKUPS


def contradictions(
    first: Figures, second: Figures, words: Mapping[str, str], product: str = "vllm"
) -> Iterator[Contradiction]:
    """What can't be true of one engine that answered ``first`` and then ``second``."""
    for figure, before in first.items():
        if figure in second and second[figure] < before:
            yield Contradiction((figure,), before, (figure,), second[figure])
    for figures, limits, equal in (*relations(words, product), OUTPUTS):
        if not {*figures, *limits} <= first.keys() & second.keys():
            continue
        for lesser, more in ((figures, limits), (limits, figures))[: 1 + equal]:
            total, limit = sum(first[each] for each in lesser), sum(second[each] for each in more)
            if total > limit:
                yield Contradiction(lesser, total, more, limit)
    if sources_add_up(words) and not second.get("preemptions") and second.get("local_hit_tokens") == 0:
        # A preempted request's hits count only in the other figure. A coordinator of a plugin may count none.
        local = first.get("local_tokens", 0.0)
        if local:
            yield Contradiction(("local_tokens",), local, ("local_hit_tokens",), 0.0)
