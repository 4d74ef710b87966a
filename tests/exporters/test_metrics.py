"""The metric table, its page, and what Prometheus is told of it."""

from __future__ import annotations

import threading
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from tests import journals
from tests.histories import GOLDEN

from kvledger.audit.replay import Book, audit_paths
from kvledger.exporters import metrics, prometheus
from kvledger.exporters.metrics import METRICS

ROOT = Path(__file__).parents[2]


def scraped(books: list[Book]) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(prometheus.BookCollector(lambda: books, threading.Lock()))
    return registry


def values(books: list[Book]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in scraped(books).collect()
        for sample in family.samples
    }


def test_the_page_is_up_to_date() -> None:
    """Write it again with: python -m kvledger.exporters.metrics > docs/metrics.md"""
    assert metrics.markdown() == (ROOT / "docs" / "metrics.md").read_text()


def test_names_are_well_formed() -> None:
    names = [metric.name for metric in METRICS]

    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.name.startswith("kvledger_")
        assert not metric.unit or metric.name.endswith(f"_{metric.unit}")
        assert metric.help.endswith(".")


def test_every_sample_has_its_labels(tmp_path: Path) -> None:
    books = audit_paths([journals.violated(tmp_path / "one")]).books
    for metric in METRICS:
        for sample in metric.read(books):
            assert len(metric.labels) == len(sample.labels), metric.name


def test_the_exposition_is_what_the_table_says(tmp_path: Path) -> None:
    books = audit_paths([journals.violated(tmp_path / "one")]).books
    text = generate_latest(scraped(books)).decode()

    for line in (
        'kvledger_prompt_tokens_total{engine="vllm 0.32.0 pid 4000",source="external"} 104.0',
        'kvledger_planned_prompt_tokens_total{engine="vllm 0.32.0 pid 4000",source="external"} 32.0',
        'kvledger_loaded_again_tokens_total{engine="vllm 0.32.0 pid 4000"} 88.0',
        'kvledger_requests_total{engine="vllm 0.32.0 pid 4000",outcome="stopped",verdict="violated"} 1.0',
    ):
        assert line in text.splitlines()
    assert 'id="tokens/negative"' in text
    for metric in METRICS:
        kind = "gauge" if metric.kind == "info" else metric.kind
        assert f"# TYPE {metric.exposed} {kind}" in text


def test_work_sums_to_what_was_scheduled(tmp_path: Path) -> None:
    for number, row in enumerate(GOLDEN):
        journals.write(tmp_path / f"engine-{number}", row.events())
    audit = audit_paths([tmp_path])
    found = values(audit.books)

    work = sum(value for (name, _), value in found.items() if name == "kvledger_work_tokens_total")

    assert audit.totals.scheduled == work


def test_counters_never_fall(tmp_path: Path) -> None:
    """Scraped after every event of every golden history, rejected drafts and all."""
    kinds = {metric.exposed: metric.kind for metric in METRICS}
    for row in GOLDEN:
        book = Book(tmp_path)
        before: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for number, event in enumerate([journals.STARTED, *row.events()]):
            book.feed(number, event)
            now = values([book])
            for key, value in before.items():
                if kinds.get(key[0]) == "counter":
                    assert value <= now[key], (row.title, key)
            before = now


def test_engines_of_one_name_are_summed(tmp_path: Path) -> None:
    books = audit_paths([journals.clean(tmp_path / "a")]).books
    books += audit_paths([journals.clean(tmp_path / "b")]).books
    labels = {"engine": "vllm 0.32.0 pid 4000", "source": "external"}

    assert 208 == scraped(books).get_sample_value("kvledger_prompt_tokens_total", labels)
