"""The counters of an engine's own ``/metrics``, by the figures that the ledger has of them.

Reading is here; comparing with the ledger is in ``compare_counters.py``, and judging them by themselves in
``audit/analysis/contradictions.py``.
"""

from __future__ import annotations

import urllib.request
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_SECONDS = 5.0
MOST_BYTES = 32 << 20

COUNTERS = {
    ("vllm:prompt_tokens_total", ""): "prompt_tokens",
    ("vllm:prompt_tokens_by_source_total", "local_cache_hit"): "local_tokens",
    ("vllm:prompt_tokens_by_source_total", "external_kv_transfer"): "external_tokens",
    ("vllm:prompt_tokens_by_source_total", "local_compute"): "computed_tokens",
    ("vllm:prompt_tokens_cached_total", ""): "cached_tokens",
    ("vllm:prefix_cache_queries_total", ""): "local_queried_tokens",
    ("vllm:prefix_cache_hits_total", ""): "local_hit_tokens",
    ("vllm:external_prefix_cache_queries_total", ""): "external_queried_tokens",
    ("vllm:external_prefix_cache_hits_total", ""): "external_hit_tokens",
    ("vllm:prompt_tokens_cached_by_source_total", "device"): "device_hit_tokens",
    ("vllm:prompt_tokens_cached_by_source_total", "host"): "host_hit_tokens",
    ("vllm:prompt_tokens_cached_by_source_total", "p2p"): "p2p_hit_tokens",
    ("vllm:prompt_tokens_cached_by_source_total", "disk"): "disk_hit_tokens",
    ("vllm:prompt_tokens_cached_by_source_total", "external_unspecified"): "unspecified_hit_tokens",
    ("vllm:num_preemptions_total", ""): "preemptions",
}
"""The figure of each vLLM counter (name, source). ``vllm:request_success`` is summed over its reasons."""

ENDED = "vllm:request_success_total"


class ScrapedEngine(NamedTuple):
    """One engine as its metrics name it."""

    url: str
    number: str
    model: str


def counters(text: str, url: str = "") -> dict[ScrapedEngine, dict[str, float]]:
    """The counters of every engine in a scrape, by figure. Raises ValueError if ``text`` can't be parsed."""
    by_engine: dict[ScrapedEngine, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels
            figure = COUNTERS.get((sample.name, labels.get("source", "")))
            if sample.name == ENDED:
                figure = "requests"
            if figure is not None:
                engine = ScrapedEngine(url, labels.get("engine", "0"), labels.get("model_name", ""))
                figures = by_engine.setdefault(engine, {})
                figures[figure] = figures.get(figure, 0.0) + sample.value
    return by_engine


def fetch(url: str) -> str:
    """Get an engine's own ``/metrics`` without a proxy. Raises OSError or ValueError."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=TIMEOUT_SECONDS) as response:
        text: bytes = response.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES} bytes")
    return text.decode()
