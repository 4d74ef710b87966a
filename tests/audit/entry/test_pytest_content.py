"""``pytest --kvledger=content``, in test runs of its own: a scheduler without a worker, and a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvledger.audit.entry import pytest_plugin

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[3]
ENGINE = """
    from kvledger.audit.demo.engine import settle_environment
    from tests.engines.content_run import engine, generate, prompts

    settle_environment(in_process=True)

    def test_twice(tmp_path):
        llm = engine(tmp_path)
        some = prompts(6)
        generate(llm, some)
        core = llm.llm_engine.engine_core.engine_core
        for cache in core.model_executor.driver_worker.worker.model_runner.kv_caches:
            cache.add_({added})
        generate(llm, some)
"""


def test_a_scheduler_without_a_worker_is_observed_at_level_blocks(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from tests.scenarios.driving import start

        def test_a_scenario():
            driver = start()
            driver.add("a", 40, 4)
            driver.run()
        """
    )
    result = pytester.runpytest_inprocess("-p", pytest_plugin.__name__, "--kvledger=content")

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        "kvledger: 1 left alone: observed at level blocks only: its engine has no worker*"
    )


def run_engine(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, added: int) -> pytest.RunResult:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    pytester.makepyfile(ENGINE.format(added=added))
    options = ("-p", pytest_plugin.__name__, "--kvledger=content", "-o", f"pythonpath={ROOT} {ROOT}/src")
    return pytester.runpytest_subprocess(*options)


@pytest.mark.whole_engine
def test_the_kv_of_a_sound_engine_is_verified(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_engine(pytester, monkeypatch, 0)

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines("kvledger: 1 engines observed at level content, 0 left alone, 0 violations")


@pytest.mark.whole_engine
def test_a_test_whose_cached_kv_is_changed_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_engine(pytester, monkeypatch, 1)

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*content/changed: *"])
