"""The kinds of invariants: what each examines, what a violation of it means, and what stops the harm now.

A family of invariants is of one kind. What an invariant itself declares comes first, so this module has only
what the invariants of a family share. Verdicts, reports and alerts take their words from here.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Literal, NamedTuple

import msgspec

from ..errors import LedgerError
from ..events import Admitted, Finished, Reported
from ..ledger.account import Settlement
from ..ledger.entries import Entry, ReportedCounts

RESET_CACHE = (
    "Reset the prefix cache (POST /reset_prefix_cache, or LLM.reset_prefix_cache()): no request hits these "
    "blocks any more."
)
EVICT_BLOCKS = (
    "Evict these blocks (BlockPool.evict_blocks), or reset the prefix cache (POST /reset_prefix_cache): no "
    "request hits them any more."
)
REMOVE_ENGINE = "Remove this engine from the router, let its requests end, and restart it."
UPDATE_AGAIN = (
    "Load all weights again on all workers, and then reset the prefix cache: the KV since is of no model."
)
CLEAR_STORE = (
    "Stop loading from the connector's store and clear it; then reset the prefix cache, which holds what was "
    "loaded."
)
RESET_INDEX = (
    "Reset the prefix cache (POST /reset_prefix_cache): the engine publishes that all blocks are cleared, "
    "and routers begin their index again."
)
RESET_AFTER_CHANGE = (
    "Reset the prefix cache after each change of weights (POST /reset_prefix_cache, or "
    "LLM.reset_prefix_cache()) and look at what it returns; clear the store of a connector too."
)
NOTHING = ""
"""No KV is wrong: only a figure is."""


class Kind(NamedTuple):
    """One kind of invariants.

    ``examines``: what it is called in a verdict. ``level``: the lowest level of observation at which it is
    examined. ``alert``: the name of its Prometheus alert; ``wrong`` and ``means`` are its words.
    ``stop_now``: what stops the harm, for invariants that do not declare it.
    """

    examines: str
    level: str
    alert: str
    wrong: str
    means: str
    stop_now: str


COUNTS = Kind(
    "counts",
    "tokens",
    "KvledgerCountsWrong",
    "counts tokens wrongly",
    "The engine's accounting is wrong: metrics, usage and bills that are made of this figure are wrong too.",
    NOTHING,
)
PROGRESS = Kind(
    "progress",
    "tokens",
    "KvledgerNoProgress",
    "leaves requests without progress",
    "Requests that could run do not get on: their clients wait for nothing.",
    REMOVE_ENGINE,
)
LOADS = Kind(
    "loads",
    "tokens",
    "KvledgerLoadsWrong",
    "and its KV connector disagree on KV",
    "The engine and its connector disagree on which tokens were loaded or saved: requests may read KV that "
    "was never loaded, or wait for it.",
    REMOVE_ENGINE,
)
OWNERSHIP = Kind(
    "ownership",
    "blocks",
    "KvledgerBlocksWrong",
    "breaks the ownership of KV-cache blocks",
    "A block of the KV cache is not what its holders take it for: requests may read the KV of others, so "
    "answers may be wrong.",
    REMOVE_ENGINE,
)
CONTENTS = Kind(
    "block contents",
    "content",
    "KvledgerContentsWrong",
    "holds KV that is not what was computed",
    "The bytes of a block are not those that were computed or stored for its tokens: answers of requests "
    "that read it may be wrong.",
    EVICT_BLOCKS,
)
WEIGHTS = Kind(
    "weights of KV",
    "blocks",
    "KvledgerWeightsStale",
    "reads KV of older weights",
    "Requests read KV that was computed before the weights changed: answers and log-probabilities are those "
    "of no model, and a trainer that learns from them drifts.",
    RESET_AFTER_CHANGE,
)
EVENTS = Kind(
    "KV events",
    "blocks",
    "KvledgerEventsWrong",
    "publishes KV events that its cache contradicts",
    "A router that keeps an index from this stream promises blocks that are gone, or does not know blocks "
    "that are cached. Answers are right; requests may go to the wrong engine.",
    RESET_INDEX,
)
ENCODER = Kind(
    "encoder cache",
    "tokens",
    "KvledgerEncoderCacheWrong",
    "loses track of its encoder cache",
    "Outputs of the encoder are computed again, or not found by a step that reads them, which stops the "
    "engine; or more requests are admitted than the cache can hold.",
    "Reset the encoder cache (LLM.reset_encoder_cache(), or POST /reset_encoder_cache) while no request "
    "runs.",
)

FAMILIES: dict[str, Kind] = {
    "tokens": COUNTS,
    "requests": PROGRESS,
    "pool": COUNTS,
    "blocks": OWNERSHIP,
    "connector": LOADS,
    "metrics": COUNTS,
    "content": CONTENTS,
    "weights": WEIGHTS,
    "events": EVENTS,
    "encoder": ENCODER,
}
"""The families of invariants, in the order of the page, and the kind of each."""

KINDS = tuple(dict.fromkeys(FAMILIES.values()))
"""Every kind, in the order in which verdicts name them."""


# --- registry ------------------------------------------------------------------------------------------
#
# The catalogue of invariants, the form of a violation, and the page ``docs/reference/invariants.md``.
#
# An invariant is a small pure function that takes a ledger entry and yields a :class:`Witness` for each
# violation. Its docstring is its definition: the first paragraph says what must hold, the rest when it is
# violated. A witness holds figures; its sentence is rendered from the template beside the check.
#
# Each family of checks is a module beside this one, which registers its checks here when it is imported.
# This module imports none of them.


Severity = Literal["violation", "drift"]
"""``violation``: the engine is wrong. ``drift``: it deliberately counts by a rule that misleads, two
computations of one block differ, or the caller chose what happened."""


class Reference(NamedTuple):
    """An upstream issue or pull request that reports such a violation."""

    name: str
    url: str


def _vllm(number: int, kind: str = "issues") -> Reference:
    return Reference(f"vLLM#{number}", f"https://github.com/vllm-project/vllm/{kind}/{number}")


def _lmcache(number: int, kind: str = "issues") -> Reference:
    return Reference(f"LMCache#{number}", f"https://github.com/LMCache/LMCache/{kind}/{number}")


def _sglang(number: int, kind: str = "issues") -> Reference:
    return Reference(f"SGLang#{number}", f"https://github.com/sgl-project/sglang/{kind}/{number}")


# GitHub redirects from /issues/ to /pull/ if the number is a pull request.
VLLM_18955 = _vllm(18955)
VLLM_18957 = _vllm(18957, "pull")
VLLM_25780 = _vllm(25780)
VLLM_26813 = _vllm(26813)
VLLM_28585 = _vllm(28585)
VLLM_30522 = _vllm(30522)
VLLM_30931 = _vllm(30931)
VLLM_33775 = _vllm(33775)
VLLM_34079 = _vllm(34079)
VLLM_36533 = _vllm(36533)
VLLM_36638 = _vllm(36638)
VLLM_36752 = _vllm(36752, "pull")
VLLM_36755 = _vllm(36755)
VLLM_36812 = _vllm(36812)
VLLM_29387 = _vllm(29387, "pull")
VLLM_37076 = _vllm(37076)
VLLM_37460 = _vllm(37460, "pull")
VLLM_38715 = _vllm(38715)
VLLM_39146 = _vllm(39146)
VLLM_39734 = _vllm(39734)
VLLM_42571 = _vllm(42571)
VLLM_42903 = _vllm(42903)
VLLM_43569 = _vllm(43569)
VLLM_43736 = _vllm(43736)
VLLM_43884 = _vllm(43884)
VLLM_44250 = _vllm(44250)
VLLM_44409 = _vllm(44409, "pull")
VLLM_44701 = _vllm(44701)
VLLM_45261 = _vllm(45261, "pull")
VLLM_45357 = _vllm(45357)
VLLM_45357_FIX = _vllm(45357, "pull")
VLLM_45704 = _vllm(45704)
VLLM_42695 = _vllm(42695)
VLLM_46125 = _vllm(46125)
VLLM_46898 = _vllm(46898)
VLLM_47136 = _vllm(47136)
VLLM_48245 = _vllm(48245)
VLLM_48933 = _vllm(48933, "pull")
VLLM_49250 = _vllm(49250)
VLLM_49674 = _vllm(49674)
VLLM_46951 = _vllm(46951)
VLLM_52234 = _vllm(52234)
VLLM_53130 = _vllm(53130)
VLLM_54443 = _vllm(54443)
VLLM_54284 = _vllm(54284, "pull")
VLLM_55733 = _vllm(55733)
VLLM_52482 = _vllm(52482, "pull")
VLLM_55092 = _vllm(55092, "pull")
VLLM_56104 = _vllm(56104)
VLLM_56525 = _vllm(56525)
VLLM_52360 = _vllm(52360)
VLLM_57562 = _vllm(57562)
VLLM_57580 = _vllm(57580)
VLLM_57661 = _vllm(57661)
VLLM_58119 = _vllm(58119)
VLLM_56643 = _vllm(56643, "pull")
LMCACHE_1361 = _lmcache(1361, "pull")
LMCACHE_1969 = _lmcache(1969)
LMCACHE_2007 = _lmcache(2007)
LMCACHE_2158 = _lmcache(2158)
LMCACHE_2821 = _lmcache(2821, "pull")
LMCACHE_2880 = _lmcache(2880, "pull")
LMCACHE_2912 = _lmcache(2912)
LMCACHE_2929 = _lmcache(2929)
LMCACHE_2961 = _lmcache(2961)
LMCACHE_3269 = _lmcache(3269)
LMCACHE_4247 = _lmcache(4247)
LMCACHE_4508 = _lmcache(4508)
LMCACHE_4463 = _lmcache(4463)
SGLANG_11970 = _sglang(11970)
SGLANG_22273 = _sglang(22273)
SGLANG_36855 = _sglang(36855)
NEMO_RL_4018 = Reference("NeMo-RL#4018", "https://github.com/NVIDIA-NeMo/RL/issues/4018")
VERL_6523 = Reference("verl#6523", "https://github.com/volcengine/verl/issues/6523")
PRIME_RL_1650 = Reference("prime-rl#1650", "https://github.com/PrimeIntellect-ai/prime-rl/issues/1650")


Figure = int | str | list[int]
"""A count, a word, or a list of block ids."""


class Witness:
    """Evidence of one violation.

    ``message`` replaces the invariant's own sentence; None keeps it. ``story`` explains to a person how it
    happened, one line each, for example both sides of a collision. ``figures`` fill the sentence's braces.
    """

    __slots__ = ("figures", "message", "story")

    def __init__(self, message: str | None = None, story: Sequence[str] = (), /, **figures: Figure) -> None:
        self.message = message
        self.story = story
        self.figures = figures


Check = Callable[[Entry], Iterator[Witness]]

Usual = Callable[[Entry], bool]
"""Whether an entry is one in which some checks can find nothing. It is asked once for all of them: most
entries are, and to call each check takes several times as long."""


def as_admitted(entry: Entry) -> bool:
    """Whether an admission has the local hit of a lookup in the same step, within the sequence."""
    said, account = entry.subject, entry.account
    if not isinstance(said, Admitted) or account is None:
        return False
    local, external = said.local_tokens, said.external_tokens
    return (
        account.looked_up_local == local >= 0 <= external
        and account.looked_up_step == said.step
        and local + external <= account.sequence_tokens
    )


def as_settled(entry: Entry) -> bool:
    """Whether the tokens of a settlement sum to its prompt, before the engine has reported any figures."""
    said, account = entry.subject, entry.account
    if not isinstance(said, Settlement) or account is None:
        return False
    settled = said.local + said.external + said.computed + said.unattained
    new = said.prompt_tokens - said.carried
    return settled == new and account.reported is None and not account.suspense


def as_finished(entry: Entry) -> bool:
    """Whether a request ended within the limit of its client, and every token has a known cause."""
    said, account = entry.subject, entry.account
    if not isinstance(said, Finished) or account is None:
        return False
    limit = account.max_tokens
    return not account.suspense and (limit is None or said.output_tokens <= limit)


def as_planned(entry: Entry) -> bool:
    """Whether a report is the only one of its prompt, and has the figures of the admission and the account.

    The prompt was computed once and in one piece, and nothing failed.
    """
    said, account = entry.subject, entry.account
    if not isinstance(said, Reported) or account is None or account.reports != 1:
        return False
    local, external, computed = said.local_tokens, said.external_tokens, said.computed_tokens
    life, settlements, split = account.reporting, account.settlements, (local, external, computed)
    if life is None or len(settlements) != 1 or account.reported != split:
        return False
    settled = settlements[0]
    return (
        (settled.local, settled.external, settled.computed) == split
        and (life.local, life.external) == (local, external)
        and local + external + computed == said.prompt_tokens
        and min(split) >= 0
        and said.written_tokens <= computed
        and not (life.voided or account.carried or account.transferred or account.executed_again)
        and len(account.executed_first) < 2
    )


def as_counted(entry: Entry) -> bool:
    """Whether the counts that the engine reported are those of the account, and lie within its sequence."""
    said = entry.subject
    if not isinstance(said, ReportedCounts):
        return False
    in_flight = max(said.ledger_in_flight, 0)
    sequence = said.sequence if said.sequence >= 0 else said.ledger_sequence
    return (
        said.computed == said.ledger_computed
        and said.in_flight in (-1, said.ledger_in_flight)
        and -1 <= said.placeholders <= in_flight
        and said.computed - in_flight < sequence
    )


USUAL: dict[type, Usual] = {
    Admitted: as_admitted,
    Finished: as_finished,
    Reported: as_planned,
    ReportedCounts: as_counted,
    Settlement: as_settled,
}
"""By type of subject: the entries that checks with ``unless=USUAL`` are not called for."""


class Invariant(msgspec.Struct, frozen=True):
    """One thing that must hold.

    ``on``: the types of subjects that it checks. ``message``: the sentence of a violation, with figures in
    braces. ``near_misses``: what looks like a violation and is not. ``must_hold`` and ``violated_when`` are
    the two parts of its definition. ``once``: it is found once an engine, and the first request stands for
    all; a rule by which the engine counts every such request needs no finding for each. ``tokens``: the
    figures of a witness that say how many tokens it is about, as ``written - computed``, of which the sign is
    left out; "" if it says no number. ``stop_now``: what stops the harm; "" if only a figure is wrong.
    ``unless``: by type of subject, the entries for which it is not called.
    """

    id: str
    severity: Severity
    on: tuple[type, ...]
    message: str
    references: tuple[Reference, ...]
    near_misses: tuple[str, ...]
    must_hold: str
    violated_when: str
    check: Check
    once: bool = False
    tokens: str = ""
    stop_now: str = ""
    unless: Mapping[type, Usual] = {}

    @property
    def family(self) -> str:
        """The part of the id before the slash."""
        return self.id.partition("/")[0]

    @property
    def kind(self) -> Kind:
        """What it examines, and what a violation of it means."""
        return FAMILIES[self.family]

    def tokens_of(self, figures: Mapping[str, Figure]) -> int | None:
        """How many tokens one finding is about; None if it says no number."""
        names = self.tokens.split(" - ")
        if not figures.keys() >= set(names):
            return None
        first, *less = (figures[name] for name in names)
        return abs(int(first) - sum(map(int, less)))  # type: ignore[arg-type]

    def render(self, witness: Witness, request: str | None) -> str:
        """The witness as one sentence."""
        return (witness.message or self.message).format(request=request, **witness.figures)


class Violation(msgspec.Struct, frozen=True):
    """One violation or drift: which invariant, in which request, and with which figures.

    ``request`` and ``life`` are None if it concerns no single request. ``step`` and ``at`` (microseconds
    since the engine started) are those of the first time it was found. ``repeats`` counts how often it was
    found again, the last time at ``last_step``: in the same request, or in the same engine if the invariant
    is found ``once`` an engine.
    """

    id: str
    severity: Severity
    engine: str
    request: str | None
    life: int | None
    step: int
    at: int
    message: str
    figures: dict[str, Figure]
    references: list[Reference]
    repeats: int
    last_step: int
    story: list[str] = []
    tenant: str = ""
    """Whom the request is for: its group (KVLEDGER_GROUP), or its cache salt's keyed hash; "": not known."""
    session: str = ""
    """The streaming-input session that the request is, else the session that it is a turn of; "" if none."""
    tokens: int | None = None
    """How many tokens it was about when it was first found; None: the finding says no number."""


CATALOGUE: dict[str, Invariant] = {}
"""Every invariant by its id, in the order of definition; see :func:`catalogue`."""


def invariant(
    id: str,
    *,
    on: tuple[type, ...],
    message: str,
    severity: Severity = "violation",
    references: tuple[Reference, ...] = (),
    near_misses: tuple[str, ...] = (),
    once: bool = False,
    tokens: str = "",
    stop_now: str | None = None,
    unless: Mapping[type, Usual] | None = None,
) -> Callable[[Check], Check]:
    """Register a check. It is called with the entries whose subject has one of the types ``on``.

    ``stop_now``: what stops the harm of a violation; by default that of its kind, and nothing for a drift.
    ``unless``: by type of subject, entries in which the check can find nothing.
    """

    def register(check: Check) -> Check:
        assert id not in CATALOGUE, f"two invariants are called {id}"
        must_hold, _, rest = inspect.cleandoc(check.__doc__ or "").partition("\n\n")
        family = id.partition("/")[0]
        assert family in FAMILIES, f"{id} has no known family"
        stop = FAMILIES[family].stop_now if severity == "violation" else ""
        CATALOGUE[id] = Invariant(
            id=id,
            severity=severity,
            on=on,
            message=message,
            references=references,
            near_misses=near_misses,
            must_hold=must_hold,
            violated_when=rest.strip(),
            check=check,
            once=once,
            tokens=tokens,
            stop_now=stop if stop_now is None else stop_now,
            unless=unless or {},
        )
        return check

    return register


def drift(
    id: str,
    *,
    on: tuple[type, ...],
    message: str,
    near_misses: tuple[str, ...],
    tokens: str,
    references: tuple[Reference, ...] = (),
    unless: Mapping[type, Usual] | None = None,
) -> Callable[[Check], Check]:
    """Register a drift of the family ``metrics``, which is found once an engine."""
    return invariant(
        f"metrics/{id}",
        on=on,
        message=message,
        severity="drift",
        references=references,
        near_misses=near_misses,
        once=True,
        tokens=tokens,
        unless=unless,
    )


def catalogue() -> dict[str, Invariant]:
    """All invariants by id."""
    return CATALOGUE


def is_once(id: str) -> bool:
    """Whether this invariant is found once an engine."""
    row = CATALOGUE.get(id)
    return row is not None and row.once


# --- pages ---------------------------------------------------------------------------------------


def explain(id: str) -> str:
    """An invariant's definition, for a terminal. Raises :class:`LedgerError` for an unknown id."""
    row = CATALOGUE.get(id)
    if row is None:
        close = get_close_matches(id, CATALOGUE, n=3, cutoff=0.4)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise LedgerError(f"no invariant is called {id!r}{hint}")
    parts = [f"{row.id} ({row.severity})", *_wrapped(row.must_hold)]
    parts += _wrapped(row.violated_when)
    if row.near_misses:
        parts.append("What looks like a violation and is not:")
        parts[-1] += "".join(f"\n{_bullet(miss)}" for miss in row.near_misses)
    if row.stop_now:
        parts.append(textwrap.fill(f"What stops the harm now: {row.stop_now}", 80))
    if row.references:
        parts.append("Seen in:")
        parts[-1] += "".join(f"\n  {name}  {url}" for name, url in row.references)
    return "\n\n".join(parts)


def _wrapped(text: str) -> list[str]:
    """The paragraphs of ``text``, for a terminal."""
    plain = text.replace("``", "")
    return [textwrap.fill(" ".join(p.split()), 80) for p in plain.split("\n\n") if p.strip()]


def _bullet(text: str) -> str:
    return textwrap.fill(text, 80, initial_indent="  - ", subsequent_indent="    ")


def markdown() -> str:
    """docs/reference/invariants.md: the whole catalogue, by family."""
    lines = [
        "# What must hold",
        "",
        "Made by `make docs`; do not edit.",
        "",
        "A *violation* means that the engine is wrong. A *drift* means that the engine deliberately counts",
        "by a rule that misleads, that two computations of one block differ by more than rounding, or that",
        "the caller chose what happened. A drift never changes the verdict. Accounts that lost events are",
        "not checked.",
    ]
    family = ""
    for row in sorted(catalogue().values(), key=_family):
        if row.family != family:
            family = row.family
            lines += ["", f"## {family.capitalize()}"]
        lines += ["", f"### `{row.id}`", "", f"*{row.severity}.* {_flowed(row.must_hold)}"]
        if row.violated_when:
            lines += ["", _flowed(row.violated_when)]
        if row.near_misses:
            lines += ["", "What looks like a violation and is not:", ""]
            lines += [f"- {miss}" for miss in row.near_misses]
        if row.stop_now:
            lines += ["", f"What stops the harm now: {row.stop_now}"]
        if row.references:
            named = ", ".join(f"[{name}]({url})" for name, url in row.references)
            lines += ["", f"Seen in {named}."]
    return "\n".join(lines) + "\n"


def _family(row: Invariant) -> int:
    return list(FAMILIES).index(row.family)


def _flowed(text: str) -> str:
    """Each paragraph on one line."""
    paragraphs = (" ".join(p.split()) for p in text.replace("``", "`").split("\n\n"))
    return "\n\n".join(paragraphs)
