"""What the figures of a trace amount to: up to three sentences, the costliest first.

A rule is a function from :class:`Facts` to a :class:`Conclusion`, or to None where its figure is below the
rule's threshold or not known. A rule that advises says which figure the advice rests on. ``RULES`` has all
rules; ``audit``, ``summary``, ``why`` and the report print what :func:`conclusions` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ...audit import causes
from ...audit.analysis.costs import REWORK, MoreBlocks
from ...audit.causes import external_loss
from ...audit.figures.totals import Totals
from ..answer import counted, made, percent, share
from .audit import AuditReport
from .costs import CostReport
from .why import Why

SHOWN = 3
"""The most sentences that are printed."""

BELOW_BLOCK_SHARE = 0.1
NOT_KNOWABLE_SHARE = 0.5
EVICTED_SHARE = 0.1
GROUPS_SHARE = 0.1
PREEMPTION_SHARE = 0.01
RECOMPUTED_SHARE = 0.01
NOT_LOADED_SHARE = 0.01
REJECTED_SHARE = 0.05
OVERRUN_SHARE = 0.02
UNATTAINED_SHARE = 0.02
"""Below these shares nothing is concluded. Of missed tokens: the first four. Of engine time if it is known,
else of scheduled tokens: preemption, recomputed, rejected, overrun. Of promised tokens: not loaded. Of
prompt tokens: unattained."""


class Facts(msgspec.Struct, kw_only=True):
    """The figures that rules read. Tokens unless the name says otherwise; None: not known.

    ``seconds`` are of engine time by kind and cause of lost work, as :class:`~.costs.CostRow` has them.
    """

    prompt_tokens: int = 0
    unattained: int = 0
    scheduled: int = 0
    rework: Mapping[str, int] = {}
    rejected: int = 0
    overrun: int = 0
    preemptions: int = 0
    promised: int = 0
    voided: Mapping[str, int] = {}
    missed: int = 0
    misses: Mapping[str, int] = {}
    sampled: tuple[int, float] | None = None
    """Blocks of the sample of misses, and the share of them that was evicted."""
    block_size: int = 0
    forgotten_hashes: int = 0
    """Evicted blocks that were not remembered to the end."""
    levels: Sequence[str] = ()
    engine_seconds: float = 0.0
    seconds: Mapping[str, float | None] = {}
    waited_seconds: float | None = None
    asynchronous_saved_seconds: float | None = None
    more_blocks: MoreBlocks | None = None
    """The fewest blocks that would have avoided most of the rework of preemptions."""


class Conclusion(NamedTuple):
    """A sentence, and the share of the engine's work that it is about, by which sentences are ranked."""

    weight: float
    text: str


Rule = Callable[[Facts], Conclusion | None]


def conclusions(facts: Facts) -> list[str]:
    """The sentences of all rules that apply, the heaviest first, at most :data:`SHOWN`."""
    found = [conclusion for rule in RULES if (conclusion := rule(facts)) is not None]
    return [one.text for one in sorted(found, key=lambda one: -one.weight)[:SHOWN]]


# --- the facts ------------------------------------------------------------------------------------------


def facts_of_audit(report: AuditReport) -> Facts:
    """The facts of an audit."""
    return made(
        Facts,
        report.work,
        prompt_tokens=report.totals.prompt_tokens,
        unattained=report.totals.unattained,
        rework=report.work.rework_by_cause,
        preemptions=report.preemptions,
        promised=report.external.promised,
        voided=report.external.voided,
    )


def concluded(report: AuditReport) -> AuditReport:
    """The audit with its conclusions."""
    facts = facts_of_audit(report)
    if report.costs is not None:
        facts = with_costs(facts, report.costs)
    return msgspec.structs.replace(report, conclusions=conclusions(facts))


def facts_of_totals(totals: Totals) -> Facts:
    """The facts of some sums."""
    return made(Facts, totals)


def explained_with(why: Why) -> Why:
    """The misses with their conclusions, also on preemptions if more blocks would have avoided them."""
    facts = Facts()
    if why.more_blocks is not None:
        rework = {causes.BLOCKS: why.preempted}
        facts = Facts(scheduled=why.scheduled, rework=rework, more_blocks=why.more_blocks)
    return msgspec.structs.replace(why, conclusions=conclusions(with_why(facts, why)))


def with_why(facts: Facts, why: Why) -> Facts:
    """The same facts with the misses by cause."""
    return msgspec.structs.replace(
        facts,
        prompt_tokens=facts.prompt_tokens or why.prompt_tokens,
        missed=why.no_hit,
        misses={row.cause: row.tokens for row in why.causes},
        sampled=why.sampled_evictions,
        block_size=why.block_size,
        levels=why.levels,
        forgotten_hashes=why.forgotten_hashes,
    )


def with_costs(facts: Facts, costs: CostReport) -> Facts:
    """The same facts with seconds."""
    loads = costs.loads
    saved = [row.asynchronous_saved_seconds for row in loads]
    known = [each for each in saved if each is not None]
    return msgspec.structs.replace(
        facts,
        engine_seconds=costs.engine_seconds,
        more_blocks=next(
            (row.more_blocks for row in costs.rows if (row.kind, row.cause) == (REWORK, causes.BLOCKS)), None
        ),
        seconds={f"{row.kind}/{row.cause}" if row.cause else row.kind: row.seconds for row in costs.rows},
        waited_seconds=sum(row.waited_seconds for row in loads) if loads else None,
        asynchronous_saved_seconds=sum(known) if loads and len(known) == len(saved) else None,
    )


# --- the rules ------------------------------------------------------------------------------------------


def preempted(facts: Facts) -> Conclusion | None:
    """Preemption made the engine compute tokens again."""
    tokens = facts.rework.get(causes.BLOCKS, 0)
    lost = _lost(facts, f"rework/{causes.BLOCKS}", tokens, PREEMPTION_SHARE)
    if lost is None:
        return None
    only = facts.preemptions and causes.RESET not in facts.rework
    after = f" after {counted(facts.preemptions, 'preemption')}" if only else ""
    more = facts.more_blocks
    avoided = None if more is None else percent(more.tokens / tokens)
    advice = f" {more.percent} % more blocks would have avoided {avoided} of them." if more else ""
    return Conclusion(
        lost.weight,
        f"Preemption for lack of free blocks cost {lost.text}: {counted(tokens, 'token')} computed "
        f"again{after}.{advice}",
    )


def recomputed(facts: Facts) -> Conclusion | None:
    """A cause other than preemption made the engine compute tokens again."""
    others = {cause: tokens for cause, tokens in facts.rework.items() if cause != causes.BLOCKS}
    if not others:
        return None
    cause = max(others, key=lambda name: others[name])
    lost = _lost(facts, f"rework/{cause}", others[cause], RECOMPUTED_SHARE)
    if lost is None:
        return None
    tokens = counted(others[cause], "token")
    return Conclusion(lost.weight, f"Computing {tokens} again ({causes.loss(cause)}) cost {lost.text}.")


def rejected(facts: Facts) -> Conclusion | None:
    """Many draft tokens were rejected."""
    lost = _lost(facts, "rejected", facts.rejected, REJECTED_SHARE)
    if lost is None:
        return None
    return Conclusion(
        lost.weight, f"Rejected drafts cost {lost.text}: {counted(facts.rejected, 'draft token')}."
    )


def overrun(facts: Facts) -> Conclusion | None:
    """Requests ran past their stop."""
    lost = _lost(facts, "overrun", facts.overrun, OVERRUN_SHARE)
    if lost is None:
        return None
    return Conclusion(
        lost.weight,
        f"Work past the stop of requests cost {lost.text}: {counted(facts.overrun, 'token')} in flight when "
        "their request ended.",
    )


def below_block(facts: Facts) -> Conclusion | None:
    """Many misses are shorter than a block."""
    size = f" of {facts.block_size}" if facts.block_size else ""
    says = (
        f"are below the block size{size}: the prefix cache holds whole blocks only, so at most these could "
        "be hits with smaller blocks."
    )
    return _missed(facts, (causes.BELOW_BLOCK, causes.SHORT_PROMPT), BELOW_BLOCK_SHARE, says)


def evicted(facts: Facts) -> Conclusion | None:
    """Many missed tokens had been in the cache."""
    bound = ": at most these could be hits with more blocks."
    if facts.forgotten_hashes:
        bound = ", at least: the audit remembers the last evicted blocks only."
    says = f"were in the prefix cache before and were evicted{bound}"
    return _missed(facts, (causes.EVICTED,), EVICTED_SHARE, says)


def other_groups(facts: Facts) -> Conclusion | None:
    """Many missed tokens were cached, and another KV cache group lacked what it needs."""
    says = (
        "were cached, but another KV cache group did not have its window or state there: at most these could "
        "be hits if it kept more."
    )
    return _missed(facts, tuple(causes.OF_GROUPS), GROUPS_SHARE, says)


def not_knowable(facts: Facts) -> Conclusion | None:
    """The level of the recording proves no cause for most misses."""
    part = _of_misses(facts, (causes.NOT_KNOWABLE,), NOT_KNOWABLE_SHARE)
    if part is None:
        return None
    if facts.sampled is not None:
        blocks, evicted = facts.sampled
        if evicted < EVICTED_SHARE:
            return None
        return Conclusion(
            _share_of_work(facts, round(evicted * facts.misses[causes.NOT_KNOWABLE])),
            f"{percent(evicted)} of the blocks that first hits did not cover were in the prefix cache before "
            f"and were evicted, by a sample of {counted(blocks, 'block')}: at most these could be hits with "
            "more blocks.",
        )
    if not facts.levels:
        return None
    return Conclusion(
        0.0,
        f"{percent(part)} of missed tokens were never seen before, or were evicted: level "
        f"{facts.levels[0]} can't tell these apart, KVLEDGER_LEVEL=blocks can.",
    )


def not_loaded(facts: Facts) -> Conclusion | None:
    """The connector promised tokens that were not loaded."""
    lost = {
        cause: tokens
        for cause, tokens in facts.voided.items()
        if cause in (causes.FAILED, causes.NOT_PLANNED, causes.NEVER_LOADED)
    }
    tokens = sum(lost.values())
    part = share(tokens, facts.promised)
    if part is None or part < NOT_LOADED_SHARE:
        return None
    cause = external_loss(max(lost, key=lambda name: lost[name]))
    return Conclusion(
        _share_of_work(facts, tokens),
        f"{percent(part)} of the {counted(facts.promised, 'token')} that the connector promised were not "
        f"loaded ({tokens:,}; most frequent cause: {cause}).",
    )


def waited_longer_than_saved(facts: Facts) -> Conclusion | None:
    """Requests waited longer for asynchronous loads than computing the tokens would have taken."""
    waited, saved = facts.waited_seconds, facts.asynchronous_saved_seconds
    if not waited or saved is None or waited <= saved:
        return None
    return Conclusion(
        (waited - saved) / max(facts.engine_seconds, waited),
        f"Requests waited {waited:,.1f} s for asynchronous loads that saved {saved:,.1f} s of computing.",
    )


def unattained(facts: Facts) -> Conclusion | None:
    """Many prompt tokens never had KV."""
    part = share(facts.unattained, facts.prompt_tokens)
    if part is None or part < UNATTAINED_SHARE:
        return None
    return Conclusion(
        _share_of_work(facts, facts.unattained),
        f"{percent(part)} of prompt tokens ({facts.unattained:,}) had no KV when their request ended.",
    )


RULES: tuple[Rule, ...] = (
    preempted,
    recomputed,
    rejected,
    overrun,
    below_block,
    evicted,
    other_groups,
    not_loaded,
    waited_longer_than_saved,
    unattained,
    not_knowable,
)


# --- shares ---------------------------------------------------------------------------------------------


def _lost(facts: Facts, key: str, tokens: int, least: float) -> Conclusion | None:
    """The share of engine time that lost work took, or of scheduled tokens; None if it is below ``least``."""
    if not tokens:
        return None
    seconds = facts.seconds.get(key)
    if seconds is not None and facts.engine_seconds:
        part = seconds / facts.engine_seconds
        text = f"about {percent(part)} of engine time ({seconds:,.1f} s)"
    elif facts.scheduled:
        part = tokens / facts.scheduled
        text = f"{percent(part)} of scheduled tokens"
    else:
        return None
    return None if part < least else Conclusion(part, text)


def _missed(facts: Facts, of: Sequence[str], least: float, says: str) -> Conclusion | None:
    """What the tokens with these causes of misses are, if their share of all misses is at least ``least``."""
    part = _of_misses(facts, of, least)
    if part is None:
        return None
    tokens = sum(facts.misses.get(cause, 0) for cause in of)
    return Conclusion(_share_of_work(facts, tokens), f"{percent(part)} of missed tokens ({tokens:,}) {says}")


def _of_misses(facts: Facts, of: Sequence[str], least: float) -> float | None:
    """The share of these causes in all misses; None if it is below ``least``."""
    part = share(sum(facts.misses.get(cause, 0) for cause in of), facts.missed)
    return None if part is None or part < least else part


def _share_of_work(facts: Facts, tokens: int) -> float:
    """Tokens as a share of scheduled tokens; where these are not known, of the prompt tokens."""
    return tokens / max(1, facts.scheduled or max(facts.prompt_tokens, facts.missed, facts.promised))
