"""The GPU programs refuse in one sentence where there is no GPU. What needs none of it is tested here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, ROOT / program, *arguments], env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("program", ["benchmarks/content_gpu.py", "proofs/gpu_engine.py"])
def test_without_a_gpu_one_sentence_says_so(program: str) -> None:
    done = run(program)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "GPU" in done.stderr or "vLLM" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.benchmark
def test_the_kernel_is_checked_and_compiled_without_a_gpu() -> None:
    done = run("benchmarks/content_gpu.py", "--check")
    assert done.returncode == 0, done.stderr
    assert "equals the torch form" in done.stdout
    assert "compile for sm_90" in done.stdout


def test_the_table_of_levels_names_outputs_that_differ() -> None:
    spec = importlib.util.spec_from_file_location("gpu_engine", ROOT / "proofs/gpu_engine.py")
    assert spec is not None
    assert spec.loader is not None
    gpu_engine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu_engine)
    run = {"digest": "aa", "tokens_a_second": [100.0, 200.0], "verdict": "-"}
    other_run = {"digest": "aa", "tokens_a_second": [98.0, 190.0], "verdict": "clean"}
    same = gpu_engine.table({"off": [run], "content": [other_run]})
    assert same[2:] == [
        "| off | 100 | 1.000 | 200 | 1.000 | equal | - |",
        "| content | 98 | 0.980 | 190 | 0.950 | equal | clean |",
    ]
    other = gpu_engine.table({"off": [run], "content": [run | {"digest": "bb"}]})
    assert other[3] == "| content | 100 | 1.000 | 200 | 1.000 | bb | - |"
