"""The engines' own figures in words: every family that the wheels at hand register, and no other."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from contextlib import suppress
from pathlib import Path

import pytest
from tests.command_line import exit_code

from kvledger.audit.checks.engine_metrics import engine_metrics, named
from kvledger.exporters.metrics.metric_list import METRICS

ROOT = Path(__file__).resolve().parents[3]
NAMES = [name for row in engine_metrics().figures for name in row.names]
NOT_FAMILIES = re.compile(r"vllm:(diffusion|spec_decode)?$|lmcache:(periodic_threads_)?$|sglang:diffusion_$")
"""Prefixes that the sources look for."""


def wheels(product: str) -> list[tuple[str, Path]]:
    """The wheels of a product that are at hand: release and folder."""
    found = [(path.parent.name, path) for path in ROOT.glob(f".releases/*/{product}")]
    cache = Path.home() / ".cache/kvledger"
    found += [(path.parent.name.rpartition("-")[2], path) for path in cache.glob(f"{product}-*/{product}")]
    spec = importlib.util.find_spec(product)
    if spec is not None and spec.origin is not None:
        with suppress(importlib.metadata.PackageNotFoundError):  # a part of it that another test imports
            release = importlib.metadata.version(f"{product}-cpu" if product == "vllm" else product)
            found.append((release, Path(spec.origin).parent))
    return [(release, path) for release, path in found if release in engine_metrics().examined[product]]


def families(product: str, folder: Path) -> set[str]:
    """What its sources name as a family: a string with the product's prefix that is no part of a sentence."""
    pattern = re.compile(rf'"({product}:[a-zA-Z_0-9]+)"')
    texts = (path.read_text(errors="replace") for path in folder.rglob("*.py") if "/test" not in str(path))
    found = {name for text in texts if f'"{product}:' in text for name in pattern.findall(text)}
    return {name for name in found if not NOT_FAMILIES.match(name)}


@pytest.mark.parametrize("product", ["vllm", "sglang", "lmcache"])
def test_every_family_that_a_wheel_registers_has_words_and_no_other(product: str) -> None:
    at_hand = wheels(product)
    if not at_hand:
        pytest.skip(f"no examined wheel of {product} is at hand")
    first = engine_metrics().examined[product][0]
    since = engine_metrics().since
    for release, folder in at_hand:
        mine = {
            name
            for name in NAMES
            if name.startswith(f"{product}:")
            and tuple(map(int, since.get(name, first).split("."))) <= tuple(map(int, release.split(".")))
        }
        assert mine == families(product, folder), release


def test_no_figure_has_words_twice() -> None:
    assert len(NAMES) == len(set(NAMES))
    assert {name for row in engine_metrics().disagree for name in row.names} <= set(NAMES)
    assert set(engine_metrics().since) <= set(NAMES)


def test_what_stands_beside_a_figure_is_a_metric_of_ours() -> None:
    ours = {found for row in engine_metrics().figures for found in re.findall(r"kvledger_\w+", row.ours)}
    metrics = {f"{each.name}{suffix}" for each in METRICS for suffix in ("", "_total", "_info")}

    assert set() == ours - metrics


@pytest.mark.parametrize(
    "name",
    [
        "vllm:prefix_cache_hits",
        "vllm:prefix_cache_hits_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:iteration_tokens_total_sum",
        "lmcache:num_hit_tokens_total",
        "usage.prompt_tokens_details.cached_tokens",
    ],
)
def test_a_figure_is_found_as_prometheus_shows_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert named(name) is not None
    assert 0 == exit_code("explain", name)
    assert named(name).says[:40] in capsys.readouterr().out  # type: ignore[union-attr]


def test_a_figure_that_no_engine_has_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == exit_code("explain", "vllm:prefix_cache_hit")
    assert "did you mean vllm:prefix_cache_hits" in capsys.readouterr().err
