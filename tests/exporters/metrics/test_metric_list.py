"""The metric table, its page, and its Prometheus exposition."""

from __future__ import annotations

import shutil
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse
from tests import journals
from tests.exporters.labels import labelled as labelled_trace
from tests.histories import GOLDEN, events

from kvledger.audit.checks.registry import catalogue
from kvledger.audit.events import Census, EngineStopped, Event, Gap, Snapshot
from kvledger.audit.journal.reader import Reader
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay.followed_audit import FollowedAudit, folded
from kvledger.audit.replay.metrics_state import MOST_VALUES, Exemplar, MetricsState
from kvledger.exporters.metrics import metric_list, prometheus
from kvledger.exporters.metrics.metric_list import METRICS
from kvledger.exporters.metrics.values import OTHER, STATES, EngineAudits, Health
from kvledger.exporters.reports.summary import summarize

ROOT = Path(__file__).parents[3]


def scraped(audits: list[FollowedAudit], *, created: bool = False) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(prometheus.AuditCollector(lambda: audits, threading.Lock(), created=created))
    return registry


def values(audits: list[FollowedAudit]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in scraped(audits).collect()
        for sample in family.samples
    }


def test_names_are_well_formed() -> None:
    names = [metric.name for metric in METRICS]

    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.name.startswith("kvledger_")
        assert not metric.unit or metric.name.endswith(f"_{metric.unit}")
        assert metric.help.endswith(".")


def test_every_sample_has_its_labels(tmp_path: Path) -> None:
    audits = journals.followed_audits(journals.violated(tmp_path / "one"))
    for metric in METRICS:
        for sample in metric.read(audits):
            assert len(metric.labels) == len(sample.labels), metric.name


def test_the_exposition_matches_the_table(tmp_path: Path) -> None:
    audits = journals.followed_audits(journals.violated(tmp_path / "one"))
    text = generate_latest(scraped(audits)).decode()

    for line in (
        'kvledger_prompt_tokens_total{engine="vllm / engine 0",source="external"} 104.0',
        'kvledger_planned_prompt_tokens_total{engine="vllm / engine 0",source="external"} 32.0',
        'kvledger_loaded_again_tokens_total{engine="vllm / engine 0"} 88.0',
        'kvledger_requests_total{engine="vllm / engine 0",outcome="stopped",verdict="violated"} 1.0',
    ):
        assert line in text.splitlines()
    assert 'id="tokens/negative"' in text
    for metric in METRICS:
        kind = "gauge" if metric.kind == "info" else metric.kind
        assert f"# TYPE {metric.exposed} {kind}" in text


def started(*stream: Event) -> FollowedAudit:
    engine_audit = FollowedAudit(Path("nowhere"))
    for number, event in enumerate([journals.STARTED, Snapshot(0, 0, [], 0), *stream]):
        engine_audit.feed(number, event)
    return engine_audit


def labelled(audits: list[FollowedAudit], name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """The samples of one metric by the values of these labels; of a histogram the counts."""
    family = {metric.exposed: metric for metric in METRICS}[name]
    assert set(labels) <= set(family.labels)
    return {
        tuple(sample.labels[label] for label in labels): sample.value
        for family in scraped(audits).collect()
        for sample in family.samples
        if sample.name == (f"{name}_count" if family.type == "histogram" else name)
    }


@pytest.mark.parametrize(
    "metric", [metric for metric in METRICS if metric.words], ids=lambda metric: metric.name
)
def test_every_label_value_starts_at_zero(metric: metric_list.Metric) -> None:
    samples = labelled(EngineAudits([started()], Health()), metric.exposed, *metric.words)

    for place, words in enumerate(metric.words.values()):
        assert set(words) <= {labels[place] for labels in samples}
    assert {0.0} == set(samples.values()) or metric.kind == "gauge"


def test_settings_have_series_if_the_engine_has_them() -> None:
    settings = {"blocks": 300, "prefix_caching": False, "policy": "fcfs", "loras": 0}
    audit = FollowedAudit(Path("nowhere"))
    audit.feed(0, replace(journals.STARTED, configuration=settings))
    samples = labelled([audit], "kvledger_engine_setting", "setting")
    assert {("blocks",): 300.0, ("prefix_caching",): 0.0, ("loras",): 0.0} == samples


def test_every_invariant_starts_at_zero_with_its_severity() -> None:
    samples = labelled([started()], "kvledger_violations_total", "id", "severity")

    assert {(row.id, row.severity): 0.0 for row in catalogue().values()} == samples


def test_requests_with_a_label_have_the_figures_of_the_summary(tmp_path: Path) -> None:
    path = labelled_trace(tmp_path / "trace")
    audits = journals.followed_audits(path)
    rows = {
        by: {row.group: row for row in summarize([path], by)} for by in ("lora", "group", "priority", "salt")
    }

    requests = labelled(audits, "kvledger_labelled_requests_total", "label", "value")
    assert {
        ("lora", "french"): 2, ("group", "a"): 1, ("group", "b"): 1, ("priority", "5"): 1,
        ("salt", "f" * 16): 1, ("salt", f"{2:016x}"): 1,
    } == requests  # fmt: skip
    rework = labelled(audits, "kvledger_labelled_rework_tokens_total", "label", "value")
    tokens = labelled(audits, "kvledger_labelled_prompt_tokens_total", "label", "value", "source")
    for label, value in requests:
        row = rows[label][value]
        assert row.rework == rework[label, value]
        assert (row.local, row.computed) == tuple(tokens[label, value, of] for of in ("local", "computed"))


def test_the_values_of_a_label_are_bounded_and_merged() -> None:
    one, other = MetricsState(), MetricsState()
    for number in range(MOST_VALUES):
        one.of_label("lora", f"adapter-{number}").requests += 1
    other.of_label("lora", "adapter-0").requests += 1
    other.of_label("lora", "one more").requests += 1

    one.merge(other)

    assert MOST_VALUES + 1 == len(one.labels["lora"])
    assert (2, 1) == (one.labels["lora"]["adapter-0"].requests, one.labels["lora"][OTHER].requests)


def test_an_unknown_label_value_is_other() -> None:
    stream = events(200, "A0+0 s200 o+ P:lightning A0+0 s201 o+ F:vanished")
    samples = labelled([started(*stream)], "kvledger_preemptions_total", "cause")
    assert 1 == samples[OTHER,] == sum(samples.values())

    outcomes = labelled([started(*stream)], "kvledger_requests_total", "outcome", "verdict")
    assert 1 == outcomes[OTHER, "clean"] == sum(outcomes.values())


def test_length_and_length_capped_are_one_outcome() -> None:
    for reason in ("length", "length_capped"):
        stream = events(200, f"A0+0 s200 o+ F:{reason}")
        samples = labelled([started(*stream)], "kvledger_requests_total", "outcome", "verdict")
        assert 1 == samples["length", "clean"]


def test_pool_usage_leaves_out_the_block_that_holds_nothing() -> None:
    engine_audit = started(*events(200, "A0+0 s200 o+ F"))
    assert {} == labelled([engine_audit], "kvledger_pool_usage_ratio")

    engine_audit.feed(100, Census(10_000, 1, [], 0, free_blocks=25, blocks=101))
    assert {(): 0.75} == labelled([engine_audit], "kvledger_pool_usage_ratio")
    engine_audit.feed(101, Census(11_000, 1, [], 0, free_blocks=100, blocks=101))
    assert {(): 0.0} == labelled([engine_audit], "kvledger_pool_usage_ratio")


def test_a_negative_planned_figure_lowers_no_counter() -> None:
    engine_audit = started(*events(200, "A40+-8 s168 o+ F"))

    planned = labelled([engine_audit], "kvledger_planned_prompt_tokens_total", "source")
    below = labelled([engine_audit], "kvledger_planned_negative_tokens_total", "source")
    assert (0, 8) == (planned["external",], below["external",])
    assert 200 == sum(planned.values()) - sum(below.values())


def test_the_state_of_an_engine(tmp_path: Path) -> None:
    """Live while the writer holds the lock; then by the reason of the stop; dead without a reason."""
    writer = JournalWriter(tmp_path / "live")
    writer.rotate()
    writer.write([journals.STARTED, Snapshot(0, 0, [], 0)])
    engine_audit = FollowedAudit(tmp_path / "live")
    with Reader(engine_audit.path) as reader:
        engine_audit.read(reader)
    reasons = {"shutdown": "stopped", "detached": "detached", "the observer of x kept failing": "failed"}

    samples = labelled([engine_audit], "kvledger_engine_state", "state")
    assert {(state,): float(state == "live") for state in STATES} == samples
    assert {(): 1.0} == labelled([engine_audit], "kvledger_engine_observed")
    writer.close()
    assert 1 == labelled([engine_audit], "kvledger_engine_state", "state")["dead",]
    for reason, state in reasons.items():
        ended = started(EngineStopped(1, reason))
        assert 1 == labelled([ended], "kvledger_engine_state", "state")[state,]
        assert {(): 0.0} == labelled([ended], "kvledger_engine_observed")


def beside(
    folder: Path, stream: list[Event], *, wall_seconds: float = 1.7e9
) -> tuple[JournalWriter, FollowedAudit]:
    """An engine that runs, under the name that others have too; its audit up to now."""
    writer = JournalWriter(folder)
    writer.rotate()
    writer.write([replace(journals.STARTED, wall_seconds=wall_seconds), Snapshot(0, 0, [], 0), *stream])
    return writer, read_again(FollowedAudit(folder))


def read_again(engine_audit: FollowedAudit) -> FollowedAudit:
    with Reader(engine_audit.path) as reader:
        engine_audit.read(reader)
    return engine_audit


def test_gauges_of_two_engines_of_one_name_are_combined(tmp_path: Path) -> None:
    """As of two containers whose engines both have process id 1, on one volume."""
    opened = events(200, "A0+0 s200 o+")[:-1]
    one, first = beside(tmp_path / "a", opened)
    other, second = beside(tmp_path / "b", [], wall_seconds=1.7e9 + 3600)
    first.checkpoint_seconds, second.checkpoint_seconds = 7.0, 5.0
    audits = [first, second]

    assert {(): 1.0} == labelled(audits, "kvledger_open_requests")
    assert {(): 1.0} == labelled(audits, "kvledger_engine_observed")
    assert 1 == labelled(audits, "kvledger_engine_state", "state")["live",]
    assert {(): 1.7e9 + 3600} == labelled(audits, "kvledger_last_event_timestamp_seconds")
    assert {(): 7.0} == labelled(audits, "kvledger_checkpoint_timestamp_seconds")
    assert 1 == len(labelled(audits, "kvledger_engine_info", "engine", "process_id"))
    one.close()
    other.close()


def test_an_engine_that_failed_is_not_hidden_by_one_that_runs_beside_it(tmp_path: Path) -> None:
    """It began while the other ran, so none replaced the other."""
    one, first = beside(tmp_path / "a", [])
    other, second = beside(tmp_path / "b", [EngineStopped(5_000_000, "the observer of x kept failing")])
    other.close()
    for audits in ([first, second], [second, first]):
        states = labelled(audits, "kvledger_engine_state", "state")
        assert {"live", "failed"} == {state for (state,), value in states.items() if value}
    one.close()


def test_an_engine_that_was_replaced_has_no_part_in_gauges(tmp_path: Path) -> None:
    """It was killed, and another began under its name since."""
    one, first = beside(tmp_path / "a", [])
    one.abandon()
    other, second = beside(tmp_path / "b", [], wall_seconds=1.8e9)
    for audits in ([first, second], [second, first]):
        states = labelled(audits, "kvledger_engine_state", "state")
        assert {"live"} == {state for (state,), value in states.items() if value}
        assert 1.8e9 == labelled(audits, "kvledger_last_event_timestamp_seconds")[()]
    other.close()


def test_times_of_engines_that_share_an_audit_are_those_of_their_clocks(tmp_path: Path) -> None:
    """Also if the engine that began first is added last."""
    for turn in (1, -1):
        sums: FollowedAudit | None = None
        for began in (1.7e9, 1.7e9 + 1000)[::turn]:
            journal = journals.violated(tmp_path / f"{turn}-{began}", wall_seconds=began)
            sums = folded("sums", read_again(FollowedAudit(journal)), sums)
        assert sums is not None
        last = 1.7e9 + 1000 + 1  # it stopped after a second
        assert {(): last} == labelled([sums], "kvledger_last_event_timestamp_seconds")
        assert sums.engine is not None
        for violation in sums.violations:
            seconds = sums.engine.began_seconds + violation.at / 1e6
            assert 0 <= seconds - (1.7e9, 1.7e9 + 1000)[::turn][0] < 1


def test_audited_tokens_by_verdict() -> None:
    clean = events(200, "A0+0 s200 o+ F")
    engine_audit = started(*clean)
    lost = [Gap(10_000, 5, "x"), *events(100, "A0+0 s100 o+ F")]
    for number, event in enumerate(lost, 100):
        engine_audit.feed(number, event)

    assert {("clean",): 201, ("violated",): 0, ("unknown",): 101} == labelled(
        [engine_audit], "kvledger_audited_tokens_total", "verdict"
    )
    assert {("known",): 1, ("unknown",): 0} == labelled([engine_audit], "kvledger_gaps_total", "size")


def test_an_unnamed_journal_is_counted_and_has_no_other_series() -> None:
    engine_audit = FollowedAudit(Path("nowhere"))
    engine_audit.feed(0, Gap(0, -1, "x"))

    assert {(): 1.0} == labelled([engine_audit], "kvledger_unnamed_journals")
    assert {} == labelled([engine_audit], "kvledger_gaps_total", "size")


def test_openmetrics_parse_with_created_times_and_exemplars(tmp_path: Path) -> None:
    audits = journals.followed_audits(journals.violated(tmp_path / "one"))
    samples = {
        (sample.name, tuple(sample.labels.get(label, "") for label in ("id", "source", "le"))): sample
        for family in parse(openmetrics(scraped(audits, created=True)).decode())
        for sample in family.samples
    }

    sample = samples["kvledger_violations_total", ("tokens/negative", "", "")]
    assert {"request_id": "request-0"} == sample.exemplar.labels
    assert 1.7e9 == samples["kvledger_violations_created", ("tokens/negative", "", "")].value
    assert 1.7e9 == samples["kvledger_request_cached_ratio_created", ("", "", "")].value
    bucket = samples["kvledger_request_cached_ratio_bucket", ("", "", "0.75")]
    assert (1.0, 0.52) == (bucket.value, bucket.exemplar.value)


def test_an_exemplar_is_never_longer_than_openmetrics_allows() -> None:
    """A request id that does not fit next to the trace id is left out, never cut."""
    trace = "0af7651916cd43dd8448eb211c80319c"
    fits = prometheus.openmetrics_exemplar(Exemplar("r" * 78, trace, 1.0, 2.0))
    long = prometheus.openmetrics_exemplar(Exemplar("r" * 79, trace, 1.0, 2.0))

    assert fits is not None and {"trace_id": trace, "request_id": "r" * 78} == fits.labels
    assert long is not None and {"trace_id": trace} == long.labels
    assert prometheus.openmetrics_exemplar(Exemplar("r" * 200, "", 1.0, 2.0)) is None


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is in Debian's package prometheus")
def test_promtool_accepts_the_exposition(tmp_path: Path) -> None:
    audits = journals.followed_audits(journals.violated(tmp_path / "one"))
    text = generate_latest(scraped(audits))
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)

    assert (0, b"") == (checked.returncode, checked.stdout + checked.stderr)


def test_no_label_holds_a_request_id(tmp_path: Path) -> None:
    audits = journals.followed_audits(journals.violated(tmp_path / "one"))

    assert b"request-0" not in generate_latest(scraped(audits))


def test_work_sums_to_what_was_scheduled(tmp_path: Path) -> None:
    journals.golden(tmp_path)
    audits = journals.followed_audits(tmp_path)
    samples = values(audits)

    work = sum(value for (name, _), value in samples.items() if name == "kvledger_work_tokens_total")

    assert sum(audit.totals().scheduled for audit in audits) == work


def test_counters_never_fall(tmp_path: Path) -> None:
    """Scraped after every event of every golden history, including rejected drafts."""
    kinds = {metric.exposed: metric.kind for metric in METRICS}
    for row in GOLDEN:
        engine_audit = FollowedAudit(tmp_path)
        before: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for number, event in enumerate([journals.STARTED, *row.events()]):
            engine_audit.feed(number, event)
            now = values([engine_audit])
            for key, value in before.items():
                if kinds.get(key[0]) == "counter":
                    assert value <= now[key], (row.title, key)
            before = now


def test_engines_of_one_name_are_summed(tmp_path: Path) -> None:
    audits = journals.followed_audits(journals.clean(tmp_path / "a"))
    audits += journals.followed_audits(journals.clean(tmp_path / "b"))
    labels = {"engine": "vllm / engine 0", "source": "external"}

    assert 208 == scraped(audits).get_sample_value("kvledger_prompt_tokens_total", labels)


@pytest.mark.parametrize("request_id", ['a"b', 'a" # {x="y"} 1', '"', 'a\\"b'])
def test_a_quote_in_a_request_id_does_not_break_an_exemplar(request_id: str) -> None:
    exemplar = prometheus.openmetrics_exemplar(Exemplar(request_id, "f" * 32, 1.0, 2.0))
    counter = prometheus.Family("x", "help", "counter")
    counter.add_sample("x_total", {"l": request_id}, 3, exemplar=exemplar)

    (parsed,) = parse(openmetrics(SimpleNamespace(collect=lambda: [counter])).decode())

    (sample,) = parsed.samples
    assert {"l": request_id} == sample.labels
    assert {"request_id": request_id.replace('"', "\\x22"), "trace_id": "f" * 32} == sample.exemplar.labels
