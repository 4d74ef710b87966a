"""The readers of the metric table: functions that take the audits and return samples.

Token and request counters sum *ended* requests only, because a counter must not fall: tokens of an open
account may still move between kinds (a draft accepted past the stop becomes overrun), and an account that
becomes unknown leaves the sums.

Label values come from closed sets. Each value has a series from the start, at zero; any other value is
counted as ``other``, so the number of series is bounded.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ... import __version__
from ...audit import causes
from ...audit.analysis.costs import KINDS
from ...audit.analysis.routing import MISSED, SURPLUS
from ...audit.checks.registry import catalogue
from ...audit.errors import LedgerError
from ...audit.figures.declared import OTHER, PROMPTS, parts_of
from ...audit.figures.totals import Totals
from ...audit.journal.format import is_live
from ...audit.journal.host_folders import place_suffix
from ...audit.ledger.kv_events import KVEventCounts
from ...audit.replay.followed_audit import FollowedAudit
from ...audit.replay.metrics_state import (
    ROLES,
    VERDICTS,
    Distribution,
    Exemplar,
    LookupCounts,
    ViolationCount,
)

# --- The label ``engine`` of metrics: the model and a number. A restarted engine continues its series.


def engine_label(engine_audit: FollowedAudit) -> str:
    """The label that the follower gave this engine, or else the one that the engine asks for."""
    return engine_audit.series or free_label(engine_audit, ())


def free_label(engine_audit: FollowedAudit, taken: Collection[str]) -> str:
    """``model / engine N``, ``on NAME`` if ``KVLEDGER_NAME`` was set, and ``in HOST`` in a host's folder.

    N is the engine's data-parallel rank, or the lowest number whose label is not ``taken``: servers of one
    model on one host all have rank 0.
    """
    model, suffix = engine_audit.model, ""
    if engine_audit.engine is not None:
        settings = engine_audit.engine.configuration
        model = model or engine_audit.engine.engine
        named = settings.get("instance") if settings.get("instance_given") else None
        suffix = f" on {named}" if named is not None else ""
        suffix += place_suffix(engine_audit.path, named)
    labels = (f"{model} / engine {number}{suffix}" for number in (engine_audit.rank, *range(len(taken) + 1)))
    return next(label for label in labels if label not in taken)


SOURCES = parts_of("prompt_tokens", PROMPTS)
PLANNED = ("local", "external", "computed")
LOST = KINDS
PREEMPTIONS = (*causes.PREEMPTIONS, OTHER)
OUTCOMES = (*causes.OUTCOMES, OTHER)
CACHES = ("local", "external")
STATES = ("live", "detached", "failed", "stopped", "dead")
SETTINGS = (
    *("blocks", "block_size", "max_running", "max_batched_tokens", "max_model_len"),
    *("prefix_caching", "drafts", "loras"),
)
"""The settings that have a series, by their names in the engine's description."""
ORDERLY = {"shutdown": "stopped", "exit": "stopped", "detached": "detached"}
GAP_SIZES = ("known", "unknown")


class MetricSample(NamedTuple):
    """One value; ``labels`` are in the order of the metric's labels.

    ``created``: Unix time since which a counter counts (0.0: unknown).
    """

    labels: tuple[str, ...]
    value: float | Distribution
    created: float = 0.0
    exemplar: Exemplar | None = None


MetricReader = Callable[[Sequence[FollowedAudit]], Iterable[MetricSample]]
Values = Iterable[tuple[tuple[str, ...], "float | Distribution"]]


# --- shapes -------------------------------------------------------------------------------------------


def engines(of: Callable[[FollowedAudit], Values]) -> MetricReader:
    """Make a reader that reads one engine at a time and puts the engine's label before the labels.

    A journal whose engine has not emitted its name has no series: the name would change later.
    """

    def read(audits: Sequence[FollowedAudit]) -> Iterator[MetricSample]:
        for engine_audit in audits:
            if engine_audit.engine is not None:
                for labels, value in of(engine_audit):
                    yield MetricSample(
                        (engine_label(engine_audit), *labels), value, engine_audit.metrics.created_seconds
                    )

    return read


def value(of: Callable[[FollowedAudit], float | Distribution]) -> MetricReader:
    """One value per engine."""
    return engines(lambda engine_audit: [((), of(engine_audit))])


def values(
    words: tuple[str, ...], of: Callable[[FollowedAudit], Mapping[str, int]], scale: int = 1
) -> MetricReader:
    """One value per word, each of ``words`` from the start, divided by ``scale``."""
    return engines(
        lambda engine_audit: [
            ((word,), n if scale == 1 else n / scale) for word, n in bounded(words, of(engine_audit)).items()
        ]
    )


def spreads(figures: Mapping[tuple[str, ...], str]) -> MetricReader:
    """The histograms of figures, by the labels of their series."""
    return engines(
        lambda engine_audit: [
            (labels, engine_audit.metrics.spreads[figure]) for labels, figure in figures.items()
        ]
    )


def bounded(words: tuple[str, ...], counts: Mapping[str, int]) -> dict[str, int]:
    """Restrict ``counts`` to these words; the counts of all other words are summed as ``other``."""
    table = dict.fromkeys(words, 0)
    for word, count in counts.items():
        key = word if word in table else OTHER
        table[key] = table.get(key, 0) + count
    return table


# --- tokens -------------------------------------------------------------------------------------------


def pool_usage(engine_audit: FollowedAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """The share of blocks that requests held at the last census."""
    state = engine_audit.metrics
    if state.pool_blocks:
        yield (), 1 - state.pool_free_blocks / state.pool_blocks


def disaggregated(engine_audit: FollowedAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """Prompt tokens of prompts that two engines share, by the role in this engine and the source."""
    for role in ROLES:
        tokens = engine_audit.metrics.disaggregated.get(role, {})
        for source in SOURCES:
            yield (role, source), tokens.get(source, 0)


def labelled_prompt_tokens(engine_audit: FollowedAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """Prompt tokens of requests with a label, by where their KV first came from."""
    for label, rows in engine_audit.metrics.labels.items():
        for value, totals in rows.items():
            for source in SOURCES:
                yield (label, value, source), getattr(totals, source)


def labelled(of: Callable[[Totals], int]) -> MetricReader:
    """A figure of requests with a label."""
    return engines(
        lambda engine_audit: (
            ((label, value), of(totals))
            for label, rows in engine_audit.metrics.labels.items()
            for value, totals in rows.items()
        )
    )


def lookups(of: Callable[[LookupCounts], int]) -> MetricReader:
    """A figure of the lookups that the engine counted, by cache."""
    return values(
        CACHES, lambda engine_audit: {cache: of(engine_audit.metrics.lookups[cache]) for cache in CACHES}
    )


# --- seconds ------------------------------------------------------------------------------------------


def lost_seconds(engine_audit: FollowedAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """Engine time of lost work by kind."""
    for kind in LOST:
        yield (kind,), engine_audit.cost_counters.lost_us.get(kind, 0) / 1e6


TURN_LOSSES_HERE = tuple(cause for cause in causes.TURN_LOSSES if cause != causes.OTHER_ENGINE)
"""Causes for which a turn misses what the turn before left in the same engine."""


def turn_losses(engine_audit: FollowedAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """Reusable tokens that turns did not hit, by cause."""
    for cause in TURN_LOSSES_HERE:
        yield (cause,), engine_audit.turns.lost.get(cause, 0)


def model_error(engine_audit: FollowedAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """Median relative error of the model of step time, if a model was fitted."""
    error = engine_audit.cost_counters.model.relative_error
    if error is not None:
        yield (), error


# --- requests -----------------------------------------------------------------------------------------


def requests(engine_audit: FollowedAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """Ended requests by verdict and outcome."""
    for verdict in VERDICTS:
        of_verdict: dict[str, int] = {}
        for (request_verdict, outcome), count in engine_audit.journal.requests.items():
            if request_verdict == verdict:
                word = outcome.removesuffix("_capped")  # vLLM v1 says length_capped, v0 length
                of_verdict[word] = of_verdict.get(word, 0) + count
        for outcome, count in bounded(OUTCOMES, of_verdict).items():
            yield (verdict, outcome), count


def violations(audits: Sequence[FollowedAudit]) -> Iterator[MetricSample]:
    """Violations of every invariant, with the last violating request as exemplar."""
    for engine_audit in audits:
        if engine_audit.engine is None:
            continue
        for id, row in catalogue().items():
            count = engine_audit.metrics.violations.get(id, ViolationCount())
            exemplar = None
            if count.request_id:
                exemplar = Exemplar(count.request_id, count.trace_id, 1.0, count.last_seconds)
            labels = (engine_label(engine_audit), id, row.severity)
            yield MetricSample(labels, count.times, engine_audit.metrics.created_seconds, exemplar)


def last_violations(engine_audit: FollowedAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """When each invariant was last violated; nothing for one that never was."""
    for id, row in catalogue().items():
        count = engine_audit.metrics.violations.get(id)
        if count is not None:
            yield (id, row.severity), count.last_seconds


# --- KV events ----------------------------------------------------------------------------------------

ANNOUNCED = ("stored", "removed", "cleared")


def kv_events(of: Callable[[KVEventCounts], Values]) -> MetricReader:
    """Counts of an engine's KV events; no series where they can't be compared with the engine's cache."""
    return engines(
        lambda engine_audit: (
            of(engine_audit.metrics.kv_events)
            if engine_audit.live_events.engine_began or engine_audit.metrics.kv_events.batches
            else ()
        )
    )


def kv_event_count(of: str) -> MetricReader:
    """One count of an engine's KV events."""
    return kv_events(lambda counts: [((), float(getattr(counts, of)))])


def announced(counts: KVEventCounts) -> Iterator[tuple[tuple[str, ...], float]]:
    """What KV events announced, by kind."""
    for word in ANNOUNCED:
        yield (word,), counts.announced.get(word, 0)


def routing_causes(of: str) -> MetricReader:
    """Tokens by cause, each cause from the start."""
    words = tuple(MISSED) if of == "missed" else tuple(SURPLUS)
    return kv_events(lambda counts: (((word,), n) for word, n in bounded(words, getattr(counts, of)).items()))


# --- coverage -----------------------------------------------------------------------------------------


def current(audits: Sequence[FollowedAudit]) -> Sequence[FollowedAudit]:
    """Without the engines that were replaced: another of their label began after their last event.

    Engines of one label that run side by side are all current, also if one of them has failed since.
    """
    latest: dict[str, FollowedAudit] = {}
    for engine_audit in audits:
        label = engine_label(engine_audit)
        before = latest.get(label)
        if before is None or before.metrics.created_seconds <= engine_audit.metrics.created_seconds:
            latest[label] = engine_audit
    kept = [
        engine_audit
        for engine_audit in audits
        if (last := latest[engine_label(engine_audit)]) is engine_audit
        or engine_audit.auditor.ledger.read_to >= last.metrics.created_seconds
        or state(engine_audit) == "live"
    ]
    return EngineAudits(kept, audits.health) if isinstance(audits, EngineAudits) else kept


def state(engine_audit: FollowedAudit) -> str:
    """The engine's state of observation, one of :data:`STATES`."""
    reason = engine_audit.auditor.ledger.stopped
    if reason is not None:
        return ORDERLY.get(reason, "failed")
    try:
        return "live" if is_live(engine_audit.path) else "dead"
    except LedgerError:
        return "dead"


def states(engine_audit: FollowedAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """1 for the present state, 0 for the others."""
    now = state(engine_audit)
    for word in STATES:
        yield (word,), float(word == now)


def settings(engine_audit: FollowedAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """The settings of :data:`SETTINGS` that the engine has recorded; 1 stands for on."""
    recorded = {} if engine_audit.engine is None else engine_audit.engine.configuration
    for name in SETTINGS:
        value = recorded.get(name)
        if isinstance(value, int):
            yield (name,), float(value)


def lag(engine_audit: FollowedAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """Seconds since the journal was last read to its end; 0 if the engine is not live."""
    if engine_audit.read_seconds:
        yield (), max(0.0, time.time() - engine_audit.read_seconds) if state(engine_audit) == "live" else 0.0


def gaps(engine_audit: FollowedAudit) -> dict[str, int]:
    """Gaps by whether the number of lost events is known."""
    return {
        "known": engine_audit.metrics.gaps_of_known_size,
        "unknown": engine_audit.metrics.gaps_of_unknown_size,
    }


def last_event(engine_audit: FollowedAudit) -> float:
    """Unix time of the last event."""
    return engine_audit.auditor.ledger.read_to


def checkpoint(engine_audit: FollowedAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """Unix time of the last checkpoint, if there is one."""
    if engine_audit.checkpoint_seconds:
        yield (), engine_audit.checkpoint_seconds


class EngineAudits(list[FollowedAudit]):
    """The audits of a follower, with the follower's own figures."""

    def __init__(self, audits: Iterable[FollowedAudit], health: Health) -> None:
        super().__init__(audits)
        self.health = health
        """The follower's own figures; the follower changes them."""


LOSS_REASONS = (
    "checkpoint damaged",
    "checkpoint of another version",
    "engine forgotten",
    "journal replaced",
    "segment removed",
)


class ThreadHealth(msgspec.Struct):
    """One thread of the sidecar: when it last said that it works, and how long it may be silent."""

    beat_at: float
    """Unix time."""
    silent_seconds: float
    failed: bool = False
    """Whether it ended by an error and did not work since."""
    restarts: int = 0
    """How often it began again."""

    @property
    def is_dead(self) -> bool:
        """Whether it failed, or was silent for too long."""
        return self.failed or time.time() - self.beat_at > self.silent_seconds


class Health(msgspec.Struct):
    """The follower's own figures."""

    lost: dict[str, int] = {}
    """How often state was lost, by reason (:data:`LOSS_REASONS`); restarts keep it."""
    saved_at: float = 0.0
    """Unix time of the last checkpoint; 0.0 if there is none."""
    save_bytes: int = 0
    """Size of the last checkpoint."""
    save_seconds: float = 0.0
    """Time that the last checkpoint took to write."""
    save_failures: int = 0
    """Checkpoints that could not be written."""
    problems: int = 0
    """Problems with journals and folders, each counted when it first appears."""
    unreadable: int = 0
    """Journals that can't be read now."""
    unread: int = 0
    """Journals of live engines of which nothing is read."""
    caught_up_seconds: float = 0.0
    """Time that the first reading of all journals took."""
    compacted_at: float = 0.0
    """Unix time at which the journals were last compacted; 0.0: not by this sidecar."""
    compact_seconds: float = 0.0
    """Time that the last compaction took, also one that failed."""
    compact_failures: int = 0
    """Compactions that failed."""
    threads: dict[str, ThreadHealth] = {}
    """The threads beside the reader, by name."""


def health(of: str) -> MetricReader:
    """A figure of the follower; no sample if the audits are not followed."""
    return lambda audits: (
        [MetricSample((), getattr(audits.health, of))] if isinstance(audits, EngineAudits) else []
    )


def threads(of: str) -> MetricReader:
    """A figure of each thread that this sidecar runs."""

    def samples(audits: Sequence[FollowedAudit]) -> Iterator[MetricSample]:
        if isinstance(audits, EngineAudits):
            for name, one in audits.health.threads.items():
                yield MetricSample((name,), getattr(one, of))

    return samples


def losses(audits: Sequence[FollowedAudit]) -> Iterator[MetricSample]:
    """How often the follower lost state, by reason."""
    if isinstance(audits, EngineAudits):
        for reason in LOSS_REASONS:
            yield MetricSample((reason,), audits.health.lost.get(reason, 0))


def unnamed(audits: Sequence[FollowedAudit]) -> Iterator[MetricSample]:
    """The number of journals without an engine's name."""
    yield MetricSample((), sum(engine_audit.engine is None for engine_audit in audits))


ENGINE_LABELS = (
    "host",
    "product",
    "version",
    "adapter",
    "level",
    "process_id",
    "model_name",
    "engine_index",
    "connector",
    "name",
)


def engine(engine_audit: FollowedAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """The engine's labels, in the order of :data:`ENGINE_LABELS`."""
    started = engine_audit.engine
    if started is None:
        return
    settings = started.configuration
    yield (
        (
            socket.gethostname(),
            started.engine,
            started.version,
            started.adapter,
            started.level,
            str(started.process_id),
            str(settings.get("model") or ""),
            str(engine_audit.rank),
            str(settings.get("connector") or ""),
            engine_audit.name,
        ),
        1,
    )


def build(audits: Sequence[FollowedAudit]) -> Iterator[MetricSample]:
    """The version of kvledger."""
    yield MetricSample((__version__,), 1)


# --- blocks -------------------------------------------------------------------------------------------


def block_states(engine_audit: FollowedAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """Blocks by state; nothing where the journal has no block events."""
    for state, count in (engine_audit.metrics.blocks.now or {}).items():
        yield (state,), count


def evicted_blocks(engine_audit: FollowedAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """Evicted blocks, by whether they had been hit; nothing where the journal has no block events."""
    blocks = engine_audit.metrics.blocks
    if blocks.seen:
        yield ("no",), blocks.use.never_hit
        yield ("yes",), blocks.use.evicted - blocks.use.never_hit


def block_count(of: str) -> MetricReader:
    """One sum of the use of blocks; no series where the journal has no block events."""
    return engines(
        lambda engine_audit: (
            [((), float(getattr(engine_audit.metrics.blocks.use, of)))]
            if engine_audit.metrics.blocks.seen
            else []
        )
    )


CONTENT_EVENTS = ("sealed", "verified", "scrubbed", "differed", "unsealed", "not_compared")
"""What can happen to a block at level ``content``."""

_NOT_COMPARED = ("same_step", "unsampled", "unseen", "loaded", "unmatched")


def content_blocks(engine_audit: FollowedAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """Blocks by what happened to their contents; nothing below level ``content``."""
    sums = engine_audit.auditor.ledger.sums
    if sums.watches:
        counts = dict(sums.contents)
        counts["differed"] = counts.get("differed", 0) + counts.get("scrub_differed", 0)
        counts["not_compared"] = sum(counts.get(name, 0) for name in _NOT_COMPARED)
        for event in CONTENT_EVENTS:
            yield (event,), float(counts.get(event, 0))


def content_transfers(engine_audit: FollowedAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """Blocks that a connector moved; nothing below level ``content``."""
    sums = engine_audit.auditor.ledger.sums
    if sums.watches:
        counts = sums.transfers
        differed = counts.get("store_differed", 0)
        yield ("stored",), float(counts.get("stored", 0))
        yield ("stored_differed",), float(differed)
        yield ("loaded",), float(counts.get("moved", 0))
        yield ("loaded_differed",), float(counts.get("transfer_differed", 0))
        yield (
            ("not_compared",),
            float(sum(counts.get(name, 0) for name in ("unknown", "foreign", "unmatched"))),
        )


def content_sum(name: str, unit: float = 1.0) -> MetricReader:
    """One sum of level ``content``, divided by ``unit``; no series below that level."""
    return engines(
        lambda engine_audit: (
            [((), engine_audit.auditor.ledger.sums.contents.get(name, 0) / unit)]
            if engine_audit.auditor.ledger.sums.watches
            else []
        )
    )


def block_times(of: str) -> MetricReader:
    """One distribution of times of blocks; no series where the journal has no block events."""
    return engines(
        lambda engine_audit: (
            [((), getattr(engine_audit.metrics, of))] if engine_audit.metrics.blocks.seen else []
        )
    )


# --- reconciliation -----------------------------------------------------------------------------------


def engine_counters(of: str) -> MetricReader:
    """The engine's own counters (``counted``) or the ledger's figures (``ledger``), by figure."""
    return engines(
        lambda engine_audit: (
            [((row.figure,), getattr(row, of)) for row in engine_audit.engine_counters.rows]
            if engine_audit.engine_counters
            else []
        )
    )


def drift(engine_audit: FollowedAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """The difference between engine and ledger, by figure and cause."""
    for row in engine_audit.engine_counters.rows if engine_audit.engine_counters else ():
        for cause, amount in row.drift.items():
            yield (row.figure, cause), amount


def reconciled(of: str) -> MetricReader:
    """A property of the engine's reconciliation, if there is one."""
    return engines(
        lambda engine_audit: (
            [((), float(getattr(engine_audit.engine_counters, of)))] if engine_audit.engine_counters else []
        )
    )
