"""The table of figures: complete for the installed vLLM, and in step with the drifts and the sidecar."""

from __future__ import annotations

import importlib.util
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from kvledger.audit.checks.figures import FIGURES
from kvledger.audit.checks.registry import catalogue
from kvledger.audit.release_semantics import VLLM_SERVER

PAGE = Path(__file__).parents[3] / "docs/reconciliation.md"
NAMES = [name for figure in FIGURES for name in figure.names]
FOUND = {id for figure in FIGURES for row in figure.deviations for id in row.finds}
ABOUT_TOKENS = re.compile(r"tokens|cache_(hits|queries)|draft|_(bytes|transfer|load|save|store|offload|xfer)")
ABOUT_TIME_OR_BLOCKS = re.compile(r"seconds|perc|_time|flops|per_gpu|websocket|info$|pages|lora")


def test_every_drift_of_a_figure_is_a_deviation_in_the_table():
    """Drifts of contents, weights, events and pools are about KV; one is about what a connector is told."""
    others = ("content/", "weights/", "events/", "pool/")
    rows = [row for row in catalogue().values() if not row.id.startswith(others)]
    rows = [row for row in rows if row.id != "connector/handed-unloaded"]
    drifts = {row.id for row in rows if row.severity == "drift"}

    assert drifts == {id for id in FOUND if catalogue()[id].severity == "drift"}


def test_every_deviation_names_an_invariant():
    assert FOUND <= catalogue().keys()


def test_no_figure_stands_in_the_table_twice():
    assert len(NAMES) == len(set(NAMES))


def test_the_compared_counters_are_those_of_the_sidecar():
    rows = [row for figure in FIGURES for row in figure.compared]

    ended = VLLM_SERVER.summed

    assert VLLM_SERVER.counters == {
        (row.counter, row.source): row.figure for row in rows if row.counter not in ended
    }
    assert ["requests"] == [row.figure for row in rows if row.counter in ended]


def test_every_figure_about_tokens_of_the_installed_vllm_is_in_the_table():
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        pytest.skip("no vLLM is installed")
    exported: set[str] = set()
    for path in Path(vllm.origin).parent.rglob("*.py"):
        text = path.read_text()
        if '"vllm:' in text:
            exported.update(re.findall(r'"(vllm:[a-z_0-9]+)"', text))
    about = {name for name in exported if ABOUT_TOKENS.search(name) and not ABOUT_TIME_OR_BLOCKS.search(name)}

    assert len(about) > 10
    assert set() == {name for name in about if not any(fnmatch(name, pattern) for pattern in NAMES)}
