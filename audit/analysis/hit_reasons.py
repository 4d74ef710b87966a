"""Why few prompt tokens hit the prefix cache, as far as a server tells it from outside.

From its metrics and its configuration; and, if it was asked, from four small requests of our own. Hits come
in whole *units* of tokens: the block size, or more with hybrid models and context parallelism. A prompt of
``n`` units and one token hits ``n`` units when it is sent again, ``n`` when only its last token differs, and
``n // 2`` when its first half is sent. Each peculiarity of an engine gives other figures.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

LOW_SHARE = 0.05
"""Reasons are given where less of the prompt tokens hit."""

MOST_SHORT = 0.5
"""Short prompts are a reason if at least this share of the prompts is too short to hit."""

FEW_PROMPTS = 8
"""A cache that holds fewer prompts of the mean length is too small for prompts to wait in it for others."""


class Probe(msgspec.Struct, frozen=True):
    """Hits of our own requests, in tokens. ``units``: how many whole units the first prompt has.

    ``told``: what the responses' usage said; ``counted``: what the hit counter grew by, None: it grew by
    others' requests too. ``spread``: another server or engine answered a later request.
    """

    unit: int
    units: int
    again: int
    last_differs: int
    half: int
    counted: int | None = None
    told: int | None = None
    spread: bool = False


class Outside(msgspec.Struct, frozen=True):
    """What an engine tells of itself. Counts of tokens since its start; None: not told."""

    prefix_caching: bool | None = None
    unit: int | None = None
    longest: int | None = None
    """The longest sequence that it serves."""
    capacity: int | None = None
    """Tokens that its cache holds."""
    queried: float | None = None
    hits: float | None = None
    computed: float | None = None
    """Prompt and output tokens that it computed."""
    prompts: float = 0
    prompt_tokens: float = 0
    short_prompts: float = 0
    """At least so many prompts were no longer than a unit."""
    adapters: bool = False
    drafts: bool = False
    align: bool = False
    """Whether it keeps Mamba states at few places of a prompt only."""
    engines: int = 1
    """How many engines answer at this address."""


class Reason(msgspec.Struct, frozen=True):
    """A reason: what is so, with its figures, and what to do."""

    id: str
    says: str
    do: str


def share(engine: Outside) -> float | None:
    """The share of the prompt tokens that were looked up and hit; None: nothing was looked up."""
    return engine.hits / engine.queried if engine.queried and engine.hits is not None else None


def reasons(engine: Outside, probe: Probe | None = None) -> list[Reason]:
    """The reasons, the surest first; none where enough hits."""
    hit = share(engine)
    if engine.prefix_caching is False:
        return [
            Reason(
                "caching-off",
                "Prefix caching is off.",
                "Start vLLM with --enable-prefix-caching, SGLang without --disable-radix-cache.",
            )
        ]
    found = list(_probed(engine, probe)) if probe is not None else []
    if hit is not None and hit >= LOW_SHARE:
        return [each for each in found if each.id == "not-counted"]
    if not engine.prompt_tokens:
        return found
    if hit is None and not any(each.id == "not-counted" for each in found):
        found.append(
            _not_counted(f"{engine.prompt_tokens:,.0f} prompt tokens came, and no lookup is counted")
        )
    return [*found, *_metered(engine, probe)]


def _probed(engine: Outside, probe: Probe) -> Iterator[Reason]:
    """What our own requests show."""
    unit, whole = probe.unit, probe.units * probe.unit
    again, last_differs, half = probe.again, probe.last_differs, probe.half
    if probe.told and probe.counted == 0:
        yield _not_counted(f"the responses tell of {probe.told:,} cached tokens, and the counter stood still")
    if not again:
        if probe.spread:
            yield Reason(
                "spread",
                "The same prompt sent twice met two engines, each with a cache of its own.",
                "Route requests by their prefix or session.",
            )
        else:
            yield Reason(
                "never-hits",
                f"A prompt of {whole + 1:,} tokens that was sent twice did not hit.",
                "The caches of this engine agree on nothing shorter, or it does not cache: see its log.",
            )
    elif again == whole - unit and half == max(0, probe.units // 2 - 1) * unit:
        yield Reason(
            "last-unit-dropped",
            f"Of an equal prompt the last {unit:,} tokens are computed again, which a drafter needs.",
            f"A hit needs at least {2 * unit + 1:,} tokens that two prompts share.",
        )
    elif again == whole and last_differs == whole - unit:
        yield Reason(
            "next-token-hashed",
            f"Prompts that share whole units of {unit:,} tokens, and differ right after, hit one unit less: "
            "the hash covers the next token, too.",
            f"A hit needs one token more than whole units of {unit:,} that two prompts share.",
        )
    elif again == whole and not half and probe.units > 1:
        yield Reason(
            "few-states",
            f"A prompt of {whole + 1:,} tokens hits when it is sent again, its first half does not: states "
            "are kept at few places of a prompt.",
            "Prompts hit where an earlier one ended. vLLM's --mamba-cache-mode all keeps every state.",
        )
    elif (again, last_differs, half) != (whole, whole, probe.units // 2 * unit):
        yield Reason(
            "larger-unit",
            f"Prompts that share {whole:,} tokens hit {again:,} and {last_differs:,}, and {half:,} where "
            f"they share {probe.units // 2 * unit:,}.",
            "Hits come in larger units than the engine tells.",
        )


def _not_counted(why: str) -> Reason:
    return Reason(
        "not-counted",
        f"The engine does not count its hits: {why}.",
        "Believe the usage in responses or vllm:prompt_tokens_by_source; a plugin may bypass the counter.",
    )


def _metered(engine: Outside, probe: Probe | None) -> Iterator[Reason]:
    """What the metrics show."""
    unit, capacity = engine.unit, engine.capacity
    if unit is not None and engine.longest is not None and engine.longest <= unit:
        yield Reason(
            "short-prompts",
            f"Hits come in units of {unit:,} tokens, and no sequence here is longer than {engine.longest:,}.",
            "Only longer prompts can hit.",
        )
        return
    if unit is not None and engine.prompts and engine.short_prompts >= MOST_SHORT * engine.prompts:
        yield Reason(
            "short-prompts",
            f"{engine.short_prompts:,.0f} of {engine.prompts:,.0f} prompts are no longer than {unit:,} "
            "tokens, in units of which hits come.",
            "Only longer prompts can hit.",
        )
        return
    if engine.engines > 1:
        yield Reason(
            "spread",
            f"{engine.engines} engines answer here, and each has a cache of its own.",
            "Route requests by their prefix or session.",
        )
    if engine.align:
        yield Reason(
            "few-states",
            "Mamba states are kept at few places of a prompt (mamba_cache_mode align).",
            "Prompts hit where an earlier one ended. vLLM's --mamba-cache-mode all keeps every state.",
        )
    if engine.drafts and probe is None:
        yield Reason(
            "drafts",
            "The engine drafts: with some drafters the last unit of each hit is computed again.",
            "--probe measures it.",
        )
    mean = engine.prompt_tokens / engine.prompts if engine.prompts else 0.0
    evicts = capacity is not None and engine.computed is not None and engine.computed > capacity
    if evicts and capacity is not None and mean:
        holds = capacity / mean
        yield Reason(
            "cache-too-small",
            f"The cache holds {capacity:,} tokens, {holds:,.1f} prompts of the mean length, and "
            f"{engine.computed or 0:,.0f} were computed: a prompt is evicted after so many tokens of others.",
            "Give the cache more memory, or send requests that share a prefix closer together.",
        )
        if holds < FEW_PROMPTS:
            return
    if capacity is not None or probe is not None:
        of = f" of {unit:,} tokens" if unit is not None else ""
        parted = "salts, adapters or images" if engine.adapters else "salts or images"
        nothing = "" if evicts else "Nothing had to be evicted. "
        yield Reason(
            "nothing-shared",
            f"{nothing}Prompts do not begin with the same whole unit{of}, or their {parted} part them.",
            "Look for a time, an id or a name at the beginning of the template.",
        )
