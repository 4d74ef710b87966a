"""The standalone test that `kvledger repro` writes: its text, and on which releases it fails and passes."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.exporters.repro.examples import EXAMPLES, FOLDER, SHOWN, written
from tests.exporters.repro.workloads import CASES, Case, add, step
from tests.releases import built

from kvledger.audit.repro.bisect import Environment, run_file
from kvledger.audit.traffic.script import Check, Op, Request
from kvledger.exporters.repro.pytest_file import WIDTH, render

ROOT = Path(__file__).parents[3]
MOST_LINES = 260
MOST_LINES_OF_DRIVER = 100
"""Bounds for the small workloads here."""


def rendered(case: Case) -> str:
    return render(case.workload, case.check, assumed=("r1 and r2 share their first 64 tokens",))


@pytest.mark.parametrize("name", CASES)
def test_the_file_is_python_of_bounded_size_without_kvledger(name: str) -> None:
    text = rendered(CASES[name])
    modules = [
        alias.name if isinstance(node, ast.Import) else str(node.module)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    assert {"vllm", "torch"} >= {each.split(".")[0] for each in modules} - set(sys.stdlib_module_names)
    assert [] == [line for line in text.splitlines() if len(line) > WIDTH + 2 or line != line.rstrip()]
    assert len(text.splitlines()) <= MOST_LINES
    driver = text.partition("# --- the driver")[2].partition("# --- the figure")[0]
    assert 30 < len(driver.splitlines()) <= MOST_LINES_OF_DRIVER


def test_the_header_has_release_finding_cause_and_what_was_assumed() -> None:
    header = ast.get_docstring(ast.parse(rendered(CASES["double-allocation"]))) or ""
    assert header.startswith("vLLM 0.23.0: one block is allocated for two KV cache groups of one request.")
    for words in (
        "Blocks in two places of the block tables: 4. Expected: 0.",
        "blocks/double-allocation",
        "vllm/v1/core/kv_cache_coordinator.py",
        "fixed in 0.24.0",
        "Assumed: r1 and r2 share their first 64 tokens",
    ):
        assert words in " ".join(header.split())


def test_a_fault_whose_cause_is_not_known_is_described_by_its_invariant() -> None:
    case = CASES["double-allocation"]
    text = render(msgspec.structs.replace(case.workload, release="0.33.0"), case.check)
    header = " ".join((ast.get_docstring(ast.parse(text)) or "").split())
    assert "A block has one owner, unless it is a cached block that several requests share." in header
    assert "where in vLLM's source is not known" in header


def test_parts_of_the_driver_that_are_not_needed_are_left_out() -> None:
    plain = rendered(CASES["reset-drops-valid-token"])
    assert "KVConnector" not in plain
    assert "speculative" not in plain
    assert "AsyncScheduler" in plain
    assert "AsyncScheduler" not in rendered(CASES["double-allocation"])


def test_a_file_about_lmcache_drives_its_own_adapter() -> None:
    text = rendered(CASES["tracker-lag"])
    assert text.startswith('"""LMCache under vLLM 0.24.0: ')
    assert '"lmcache.chunk_size": 32,' in text
    assert "ScriptedConnector" not in text


def test_the_script_ends_where_the_figure_is_read() -> None:
    rows = rendered(CASES["double-allocation"]).partition("SCRIPT = ")[2].partition("]")[0]
    assert ["add", "step", "add", "step", "add", "schedule"] == [
        ast.literal_eval(line.strip().rstrip(","))[0] for line in rows.splitlines()[1:]
    ]


def test_equal_text_for_equal_workloads() -> None:
    case = CASES["placeholder-leak"]
    again = msgspec.convert(msgspec.to_builtins(case.workload), type(case.workload))
    assert rendered(case) == render(again, case.check, assumed=("r1 and r2 share their first 64 tokens",))


EVERYTHING = Case(
    msgspec.structs.replace(
        CASES["placeholder-leak"].workload,
        engine={"connector": "scripted", "drafts": 2, "policy": "priority", "groups": ("full", "sliding")},
        requests={
            "r1": Request(
                prompt=(("a", 40),),
                resumable=True,
                chunks=((("b", 20),),),
                salt="x",
                priority=3,
                stop_at=9,
                answers=(None, 16, (16, True)),
                hold=True,
            ),
            "r2": Request(prompt=(("a", 32), ("r1 out", 4)), max_tokens=4, lora=1),
        },
        script=(
            *add("r1"),
            *step(2, accepted={"r1": 1}),
            Op("abort", "r2"),
            *add("r1"),
            *step(3),
            *add("r2"),
            Op("reset"),
            *step(4, failed_whole=("r2",), loaded=("r1",), sent=("r1",)),
            Op("close", "r1"),
            *step(6),
        ),
    ),
    Check("executed", "r1", -1, 0, "tokens of r1 that were executed", "tokens/suspense"),
    (),
)


@pytest.mark.parametrize("case", [CASES["placeholder-leak"], EVERYTHING], ids=["leak", "everything"])
def test_the_file_runs_with_the_installed_vllm(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    file = tmp_path / "a_reproduction.py"
    file.write_text(rendered(case))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    seen, is_right = importlib.import_module("a_reproduction").figure()
    monkeypatch.delitem(sys.modules, "a_reproduction")
    assert not is_right
    assert case is EVERYTHING or case.check.engine == seen


@pytest.mark.whole_engine
def test_pytest_reports_both_figures(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    file = tmp_path / "test_repro.py"
    file.write_text(rendered(CASES["failed-load-stays-cached"]))
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert 1 == ran.returncode
    assert "local, external and computed tokens of r2: [192, 0, 8], right: [64, 0, 136]" in ran.stdout


@pytest.mark.parametrize("name", SHOWN)
def test_the_examples_in_the_documentation_are_current(name: str) -> None:
    assert (FOLDER / name).read_text() == written(name), "run: python -m tests.exporters.repro.examples"


RUNS = [
    (name, release, result)
    for name, case in (CASES | EXAMPLES).items()
    for release, result in [*((bad, "fails") for bad in case.bad), (case.good, "passes")]
    if release
]


@pytest.mark.releases
@pytest.mark.parametrize(("name", "release", "result"), RUNS)
def test_the_file_fails_with_the_fault_and_passes_where_it_is_fixed(
    name: str, release: str, result: str, tmp_path: Path
) -> None:
    built(release)
    file = tmp_path / "test_repro.py"
    file.write_text(rendered((CASES | EXAMPLES)[name]))
    script = str(ROOT / "scripts/releases.py")
    ran = run_file(file, Environment(release, (sys.executable, script, "run", release, "--", "python")))
    assert result == ran.result, ran.figure
