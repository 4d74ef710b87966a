"""The one metric table: name, unit, kind, help, labels, reader. Everything else is made from it.

A reader (``readings.py``) takes the books of the engines that are followed and gives samples;
:func:`collect` is what every exporter asks. ``python -m kvledger.exporters.metrics.table`` prints
``docs/metrics.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from ...audit.checks.registry import catalogue
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.metrics_state import REWORK, SHARES, TIMES, VERDICTS, WAIT_SECONDS, Distribution
from . import values as read
from .values import Reader, Sample

Kind = Literal["counter", "gauge", "histogram", "info"]

SUFFIXES: dict[Kind, str] = {"counter": "_total", "gauge": "", "histogram": "", "info": "_info"}


class Metric(NamedTuple):
    """One row. A counter is exposed with ``_total`` behind its name, an info with ``_info``.

    ``words``: the values of labels that have a closed set of them; each is shown from the start.
    ``bounds``: a histogram's, the last but infinity.
    """

    name: str
    unit: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    read: Reader
    words: Mapping[str, Sequence[str]] = {}
    bounds: tuple[float, ...] = ()

    @property
    def exposed(self) -> str:
        """The name as a scrape shows it."""
        return self.name + SUFFIXES[self.kind]


class Group(NamedTuple):
    """Metrics of one subject, with what there is to know of all of them."""

    title: str
    says: str
    metrics: tuple[Metric, ...]


ENGINE = ("engine",)
TOKENS = "tokens"
IDS = tuple(catalogue())

GROUPS: tuple[Group, ...] = (
    Group(
        "Prompts",
        "Where the prompts' KV came from. `kvledger_prompt_tokens_total` is settled once a request and "
        "is never changed by a preemption, a resumption or a second look-up.",
        (
            Metric(
                "kvledger_prompt_tokens",
                TOKENS,
                "counter",
                "Prompt tokens by where their KV first came from, settled once a request.",
                (*ENGINE, "source"),
                read.values(read.SOURCES, read.prompt_tokens),
                {"source": read.SOURCES},
            ),
            Metric(
                "kvledger_planned_prompt_tokens",
                TOKENS,
                "counter",
                "Prompt tokens by the promise of the first admission that ran, which is what vLLM 0.26 and "
                "later report.",
                (*ENGINE, "source"),
                read.values(read.PLANNED, lambda book: book.metrics.planned),
                {"source": read.PLANNED},
            ),
            Metric(
                "kvledger_planned_negative_tokens",
                TOKENS,
                "counter",
                "How far below zero promises of a source lay; in no other figure, so that no counter falls.",
                (*ENGINE, "source"),
                read.values(read.PLANNED, lambda book: book.metrics.planned_negative),
                {"source": read.PLANNED},
            ),
        ),
    ),
    Group(
        "Work",
        "What the engine scheduled, and what became of it. The kinds of `kvledger_work_tokens_total` sum "
        "to all that was scheduled; `kvledger_rework_tokens_total` is its kind `rework` by cause.",
        (
            Metric(
                "kvledger_work_tokens",
                TOKENS,
                "counter",
                "Scheduled tokens by what became of them.",
                (*ENGINE, "kind"),
                read.values(read.WORK, read.work),
                {"kind": read.WORK},
            ),
            Metric(
                "kvledger_rework_tokens",
                TOKENS,
                "counter",
                "Tokens scheduled again, by the cause for which their KV had ceased to be.",
                (*ENGINE, "cause"),
                read.values(read.LOSSES, lambda book: book.closed.rework),
                {"cause": read.LOSSES},
            ),
            Metric(
                "kvledger_discarded_tokens",
                TOKENS,
                "counter",
                "Tokens whose KV was given up with their life, by cause.",
                (*ENGINE, "cause"),
                read.values(read.DISCARDS, lambda book: book.closed.discarded),
                {"cause": read.DISCARDS},
            ),
            Metric(
                "kvledger_hit_again_tokens",
                TOKENS,
                "counter",
                "Local hits of later lives over tokens that had come to be before.",
                ENGINE,
                read.value(lambda book: book.closed.hit_again),
            ),
            Metric(
                "kvledger_loaded_again_tokens",
                TOKENS,
                "counter",
                "External loads of later lives over tokens that had come to be before.",
                ENGINE,
                read.value(lambda book: book.closed.loaded_again),
            ),
        ),
    ),
    Group(
        "External tokens",
        "What the connector promised, and what came of it: promised = loaded + voided. What a prefill "
        "engine hands over was computed there: a fleet that adds it to its hits counts each prompt twice, so "
        "it is kept apart as transferred. No connector tells the scheduler a load's tier (host, disk, "
        "peer), so none is shown; `kvledger_engine_info` has the `connector`.",
        (
            Metric(
                "kvledger_external_promised_tokens",
                TOKENS,
                "counter",
                "External tokens that the connector promised, at every admission.",
                ENGINE,
                read.value(lambda book: book.closed.promised),
            ),
            Metric(
                "kvledger_transferred_prompt_tokens",
                TOKENS,
                "counter",
                "Of `kvledger_prompt_tokens_total`, source `external`: what a prefill engine handed over.",
                ENGINE,
                read.value(lambda book: book.metrics.transferred_tokens),
            ),
            Metric(
                "kvledger_external_loaded_tokens",
                TOKENS,
                "counter",
                "External tokens that came.",
                ENGINE,
                read.value(lambda book: book.closed.loaded),
            ),
            Metric(
                "kvledger_external_voided_tokens",
                TOKENS,
                "counter",
                "External tokens that were promised and did not come, by cause.",
                (*ENGINE, "cause"),
                read.values(read.VOIDS, lambda book: book.closed.voided),
                {"cause": read.VOIDS},
            ),
        ),
    ),
    Group(
        "Look-ups",
        "What the engine counted of its own look-ups, resumed requests included (`vllm:prefix_cache_*` "
        "leave those out). They count as they happen. An engine that runs without statistics counts none.",
        (
            Metric(
                "kvledger_lookups",
                "",
                "counter",
                "Look-ups that the engine counted, by cache.",
                (*ENGINE, "cache"),
                read.lookups(lambda asked: asked.lookups),
                {"cache": read.CACHES},
            ),
            Metric(
                "kvledger_lookup_queried_tokens",
                TOKENS,
                "counter",
                "Tokens that were looked up, by cache.",
                (*ENGINE, "cache"),
                read.lookups(lambda asked: asked.queried),
                {"cache": read.CACHES},
            ),
            Metric(
                "kvledger_lookup_hit_tokens",
                TOKENS,
                "counter",
                "Tokens that were found, by cache.",
                (*ENGINE, "cache"),
                read.lookups(lambda asked: asked.hit),
                {"cache": read.CACHES},
            ),
        ),
    ),
    Group(
        "Requests",
        "A request is counted when it ends; the histograms leave unknown ones out. Their buckets bear the "
        "latest request as an exemplar, with the caller's trace id where the engine was handed one.",
        (
            Metric(
                "kvledger_requests",
                "",
                "counter",
                "Requests that have ended, by verdict and outcome.",
                (*ENGINE, "verdict", "outcome"),
                read.engines(read.requests),
                {"verdict": VERDICTS, "outcome": read.OUTCOMES},
            ),
            Metric(
                "kvledger_open_requests",
                "",
                "gauge",
                "Requests whose accounts are open.",
                ENGINE,
                read.value(lambda book: len(book.auditor.ledger.open)),
            ),
            Metric(
                "kvledger_preemptions",
                "",
                "counter",
                "Preemptions by cause, as they happen.",
                (*ENGINE, "cause"),
                read.values(read.PREEMPTIONS, lambda book: book.metrics.preemptions),
                {"cause": read.PREEMPTIONS},
            ),
            Metric(
                "kvledger_request_cached_ratio",
                "ratio",
                "histogram",
                "The share of a request's prompt that was local or external.",
                ENGINE,
                read.value(lambda book: book.metrics.cached_share),
                bounds=SHARES,
            ),
            Metric(
                "kvledger_request_rework_ratio",
                "ratio",
                "histogram",
                "The share of a request's scheduled tokens that was rework.",
                ENGINE,
                read.value(lambda book: book.metrics.rework_share),
                bounds=REWORK,
            ),
            Metric(
                "kvledger_request_preemptions",
                "",
                "histogram",
                "How often a request was preempted.",
                ENGINE,
                read.value(lambda book: book.metrics.preempted),
                bounds=TIMES,
            ),
            Metric(
                "kvledger_request_remote_wait_seconds",
                "seconds",
                "histogram",
                "How long a request waited for remote KV in all, of those that did.",
                ENGINE,
                read.value(lambda book: book.metrics.remote_wait),
                bounds=WAIT_SECONDS,
            ),
        ),
    ),
    Group(
        "Findings",
        "Every invariant of [the catalogue](invariants.md) is there from the start. A *violation* means that "
        "the engine is wrong; a *drift*, that it counts by a rule that misleads.",
        (
            Metric(
                "kvledger_violations",
                "",
                "counter",
                "How often an invariant was seen broken.",
                (*ENGINE, "id", "severity"),
                read.violations,
                {"id": IDS, "severity": ("violation", "drift")},
            ),
            Metric(
                "kvledger_last_violation_timestamp_seconds",
                "seconds",
                "gauge",
                "When an invariant was last seen broken, Unix time; no series for one that never was.",
                (*ENGINE, "id", "severity"),
                read.engines(read.last_violations),
            ),
        ),
    ),
    Group(
        "Coverage",
        "Whether silence means health. An engine that is not `live` is not observed: `detached` and `failed` "
        "engines may serve on, `stopped` ones ended in good order, `dead` ones did not. Tokens of requests "
        "that lost events touched are `unknown`.",
        (
            Metric(
                "kvledger_engine_observed",
                "",
                "gauge",
                "1 while the engine is under observation, else 0.",
                ENGINE,
                read.value(lambda book: float(read.state(book) == "live")),
            ),
            Metric(
                "kvledger_engine_state",
                "",
                "gauge",
                "1 for what became of the observation of an engine, 0 for the other states.",
                (*ENGINE, "state"),
                read.engines(read.states),
                {"state": read.STATES},
            ),
            Metric(
                "kvledger_audited_tokens",
                TOKENS,
                "counter",
                "Prompt and output tokens of requests that have ended, by verdict.",
                (*ENGINE, "verdict"),
                read.values(VERDICTS, lambda book: book.metrics.sequence_tokens),
                {"verdict": VERDICTS},
            ),
            Metric(
                "kvledger_journal_lag_seconds",
                "seconds",
                "gauge",
                "All that was written until so many seconds ago has been read; 0 of an engine that is gone.",
                ENGINE,
                read.engines(read.lag),
            ),
            Metric(
                "kvledger_events",
                "",
                "counter",
                "Events read from the engine's journal.",
                ENGINE,
                read.value(lambda book: book.events),
            ),
            Metric(
                "kvledger_last_event_timestamp_seconds",
                "seconds",
                "gauge",
                "When the last event read happened, Unix time.",
                ENGINE,
                read.value(read.last_event),
            ),
            Metric(
                "kvledger_gaps",
                "",
                "counter",
                "How often events were lost, by whether it is known how many.",
                (*ENGINE, "size"),
                read.values(read.GAP_SIZES, read.gaps),
                {"size": read.GAP_SIZES},
            ),
            Metric(
                "kvledger_lost_events",
                "",
                "counter",
                "Events lost, in gaps of known size.",
                ENGINE,
                read.value(lambda book: book.metrics.lost_events),
            ),
            Metric(
                "kvledger_hook_failures",
                "",
                "counter",
                "How often an observer failed in the engine.",
                ENGINE,
                read.value(lambda book: book.auditor.ledger.hook_failures),
            ),
            Metric(
                "kvledger_hook_sampled_seconds",
                "seconds",
                "counter",
                "Time in hooks, in the steps in which it was taken: some in sixty-four.",
                ENGINE,
                read.value(lambda book: book.metrics.hook_us / 1e6),
            ),
            Metric(
                "kvledger_hook_sampled_steps",
                "",
                "counter",
                "Steps in which the time in hooks was taken.",
                ENGINE,
                read.value(lambda book: book.metrics.hook_steps),
            ),
            Metric(
                "kvledger_check_failures",
                "",
                "counter",
                "How often a check itself failed: a defect of kvledger.",
                ENGINE,
                read.value(lambda book: sum(book.auditor.check_failures.values())),
            ),
            Metric(
                "kvledger_checkpoint_timestamp_seconds",
                "seconds",
                "gauge",
                "When the engine's account was last saved, Unix time; no series where it never was.",
                ENGINE,
                read.engines(read.checkpoint),
            ),
            Metric(
                "kvledger_unnamed_journals",
                "",
                "gauge",
                "Journals in which no engine has said its name; they are in no other metric.",
                (),
                read.unnamed,
            ),
        ),
    ),
    Group(
        "Reconciliation",
        "The engine's own counters beside the ledger, since a common baseline, where the engine's own "
        "metrics are scraped too ([reconciliation](reconciliation.md)). `figure` names a counter. Only the "
        "cause `unexplained` is worth an alert.",
        (
            Metric(
                "kvledger_reconciliation_engine",
                "",
                "gauge",
                "What the engine's own counter rose by.",
                (*ENGINE, "figure"),
                read.engine_counters("counted"),
            ),
            Metric(
                "kvledger_reconciliation_ledger",
                "",
                "gauge",
                "What the ledger's figure rose by.",
                (*ENGINE, "figure"),
                read.engine_counters("ledger"),
            ),
            Metric(
                "kvledger_reconciliation_drift",
                "",
                "gauge",
                "The engine's figure less the ledger's, by cause.",
                (*ENGINE, "figure", "cause"),
                read.engines(read.drift),
            ),
            Metric(
                "kvledger_reconciliation_up",
                "",
                "gauge",
                "Whether the last scrape of the engine's own metrics succeeded.",
                ENGINE,
                read.reconciled("answered"),
            ),
            Metric(
                "kvledger_reconciliation_scrape_timestamp_seconds",
                "seconds",
                "gauge",
                "When the engine's own metrics were last read, Unix time.",
                ENGINE,
                read.reconciled("scraped_seconds"),
            ),
            Metric(
                "kvledger_reconciliation_baseline_timestamp_seconds",
                "seconds",
                "gauge",
                "Since when the two are compared, Unix time.",
                ENGINE,
                read.reconciled("baseline_seconds"),
            ),
        ),
    ),
    Group(
        "The sidecar",
        "How `kvledger serve` itself does; not of books that nobody follows. "
        "[What each loss means](sidecar.md#after-a-restart).",
        (
            Metric(
                "kvledger_sidecar_losses",
                "",
                "counter",
                "How often what was known before a restart, or is to be read, was not there; no figure is "
                "made up for it.",
                ("reason",),
                read.amiss,
                {"reason": read.AMISS},
            ),
            Metric(
                "kvledger_sidecar_unreadable_journals",
                "",
                "gauge",
                "Journals that can't be read now; the sidecar's log and first page say why.",
                (),
                read.health("unreadable"),
            ),
            Metric(
                "kvledger_sidecar_catch_up_seconds",
                "seconds",
                "gauge",
                "How long this sidecar read before it first answered.",
                (),
                read.health("caught_up_seconds"),
            ),
            Metric(
                "kvledger_sidecar_checkpoint_bytes",
                "bytes",
                "gauge",
                "Size of the last checkpoint.",
                (),
                read.health("save_bytes"),
            ),
            Metric(
                "kvledger_sidecar_checkpoint_seconds",
                "seconds",
                "gauge",
                "How long the last checkpoint took to write.",
                (),
                read.health("save_seconds"),
            ),
            Metric(
                "kvledger_sidecar_checkpoint_failures",
                "",
                "gauge",
                "Checkpoints that could not be written since this sidecar started.",
                (),
                read.health("save_failures"),
            ),
        ),
    ),
    Group(
        "Who is who",
        "To join these figures with the engine's own, group by `engine_index` and what your scrape adds "
        "(pod, instance): vLLM calls that index `engine`. `model_name` is the served one; of a local path "
        "only the last part.",
        (
            Metric(
                "kvledger_engine",
                "",
                "info",
                "The engines under observation, those that are gone included.",
                (*ENGINE, *read.ENGINE_LABELS),
                read.engines(read.engine),
            ),
            Metric(
                "kvledger_build",
                "",
                "info",
                "The kvledger that serves this.",
                ("version",),
                read.build,
            ),
        ),
    ),
)

METRICS: tuple[Metric, ...] = tuple(metric for group in GROUPS for metric in group.metrics)


def collect(books: Sequence[EngineAudit]) -> list[tuple[Metric, list[Sample]]]:
    """Every metric with its samples of now; what two journals of one engine say is one sample.

    Counters and histograms are summed, since the earlier of two; of the rest the later journal's
    holds, and of an info there is one an engine.
    """
    return [(metric, merged(metric, metric.read(books))) for metric in METRICS]


def merged(metric: Metric, samples: Iterable[Sample]) -> list[Sample]:
    """One sample for each set of labels."""
    found: dict[tuple[str, ...], Sample] = {}
    for sample in samples:
        key = sample.labels[:1] if metric.kind == "info" else sample.labels
        known = found.get(key)
        if known is not None and metric.kind in ("counter", "histogram"):
            sample = _summed(known, sample)
        found[key] = sample
    return list(found.values())


def _summed(one: Sample, other: Sample) -> Sample:
    created = min(one.created, other.created)
    if isinstance(one.value, Distribution) and isinstance(other.value, Distribution):
        both = Distribution.over(one.value.bounds)
        both.merge(one.value)
        both.merge(other.value)
        return Sample(one.labels, both, created)
    assert not isinstance(one.value, Distribution) and not isinstance(other.value, Distribution)
    return Sample(one.labels, one.value + other.value, created, other.exemplar or one.exemplar)


# --- the page -------------------------------------------------------------------------------------------

HEAD = """# Metrics

Made by `python -m kvledger.exporters.metrics.table`; do not edit.

`kvledger serve PATH` serves these at `/metrics`. `engine` names one observed process. Unless a line
says otherwise, figures of tokens and requests are of requests that have ended, and requests that
lost events touched are in none but `kvledger_requests_total` and `kvledger_audited_tokens_total`,
with the verdict `unknown`. Labels with a closed set of values show every one of it from the start, at
zero; `other` stands for a word that this release does not know. No label bears a request's id:
exemplars do, in the OpenMetrics format.
"""


def markdown() -> str:
    """docs/metrics.md."""
    lines = [HEAD.rstrip("\n")]
    for group in GROUPS:
        lines += ["", f"## {group.title}", "", group.says, ""]
        lines += ["| name | kind | unit | labels | what it is |", "|---|---|---|---|---|"]
        for metric in group.metrics:
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            lines.append(f"| `{metric.exposed}` | {metric.kind} | {metric.unit} | {labels} | {metric.help} |")
        for metric in group.metrics:
            for label, words in metric.words.items():
                shown = "every id of the catalogue" if words is IDS else ", ".join(f"`{w}`" for w in words)
                lines += ["", f"`{metric.exposed}`: `{label}` is {shown}."]
            if metric.bounds:
                bounds = ", ".join(f"{bound:g}" for bound in metric.bounds)
                lines += ["", f"`{metric.exposed}`: buckets up to {bounds}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
