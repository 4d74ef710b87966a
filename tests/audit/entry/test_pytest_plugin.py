"""The pytest plugin, in test runs of its own: real schedulers, with and without a fault."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

import kvledger.audit.entry.pytest_plugin  # noqa: F401
from kvledger import attach
from kvledger.audit.conformance.driver import start

pytest_plugins = ["pytester"]

CLEAN = """
    from kvledger.audit.conformance.driver import start

    def test_a_scenario():
        driver = start()
        driver.add("a", 40, 4)
        driver.run()
"""
TWICE = """
    from kvledger.audit.conformance.driver import start

    def test_a_table_freed_twice():
        driver = start()
        driver.add("a", 40, 4)
        driver.step()
        manager = driver.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        blocks = list(manager.req_to_blocks["a"])
        manager.free("a")
        manager.req_to_blocks["a"] = blocks
        manager.free("a")
        assert {holds}
"""


@pytest.fixture(scope="module", autouse=True)
def everything_is_imported() -> None:
    """The runs within this one forget what they import, and vLLM can't be imported twice."""
    driver = start(lambda scheduler: attach(scheduler, level="blocks"), connector="scripted")
    driver.add("a", 40, 4)
    driver.run()


def run(pytester: pytest.Pytester, source: str, *options: str, **words: object) -> pytest.RunResult:
    pytester.makepyfile(source.format(**words) if words else source)
    return pytester.runpytest_inprocess("-p", "kvledger.audit.entry.pytest_plugin", *options)


def test_a_clean_test_passes_and_its_engine_is_counted(pytester: pytest.Pytester) -> None:
    result = run(pytester, CLEAN)

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines("kvledger: 1 engines watched at level blocks, 0 left alone, 0 violations")


def test_a_violation_fails_the_test_with_the_report(pytester: pytest.Pytester) -> None:
    result = run(pytester, TWICE, holds=True)

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "blocks/double-free: Block * was freed at step 1 for request a, life 1, group 0, who does not *",
            "block * of pool 0, *; the engine counts -1 references",
            "    step 1: taken, request a, life 1, group 0, by allocate_new_blocks",
            "    step 1: freed, request a, life 1, group 0, by free",
        ]
    )


def test_a_test_that_fails_by_itself_says_why_and_has_the_report_beside(pytester: pytest.Pytester) -> None:
    result = run(pytester, TWICE, holds="blocks == 7")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E * == 7*", "*- Captured kvledger call -*", "blocks/double-free: *"])


def test_what_is_allowed_fails_nothing(pytester: pytest.Pytester) -> None:
    ids = ("blocks/double-free", "blocks/free-iff-unreferenced", "blocks/references", "tokens/balance")
    allowed = [f"--kvledger-allow={each}" for each in ids]

    run(pytester, TWICE, *allowed, holds=True).assert_outcomes(passed=1)


def test_one_that_is_allowed_does_not_allow_another(pytester: pytest.Pytester) -> None:
    result = run(pytester, TWICE, "--kvledger-allow=tokens/balance", holds=True)

    result.assert_outcomes(failed=1)


def test_at_level_tokens_no_block_is_watched(pytester: pytest.Pytester) -> None:
    result = run(pytester, TWICE, "--kvledger-level=tokens", holds=True)

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines("kvledger: 1 engines watched at level tokens, *")


def test_with_stacks_each_operation_has_the_line_that_led_to_it(pytester: pytest.Pytester) -> None:
    result = run(pytester, TWICE, "--kvledger-stacks", holds=True)

    result.stdout.fnmatch_lines(
        [
            "    step 1: freed, request a, life 1, group 0, by free",
            "      *test_with_stacks*.py:* test_a_table_freed_twice",
        ]
    )


def test_a_manager_without_a_scheduler_is_watched(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        from kvledger.audit.conformance.driver import start
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        def test_a_manager():
            made = start().scheduler.kv_cache_manager
            manager = KVCacheManager(
                made.kv_cache_config, 1024, 16, 16, enable_caching=True, log_stats=False
            )
            manager.block_pool.get_new_blocks(2)[0].ref_cnt = 0
        """,
    )

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines("blocks/references: Block 1 has 0 references, but 1 holders are known*")


def test_a_connector_that_a_test_gives_its_scheduler_later_is_watched(pytester: pytest.Pytester) -> None:
    """Also where requests were added before; and a mock may be asked how often it was called."""
    result = run(
        pytester,
        """
        from unittest.mock import Mock
        from kvledger.audit.conformance.driver import start

        def test_a_scenario():
            driver = start(connector="scripted")
            connector = driver.scheduler.connector
            driver.add("a", 100, 4)
            driver.scheduler.connector = Mock(wraps=connector)
            driver.scheduler.connector.held = set()
            connector.say("a", 64)
            scheduled = driver.schedule()
            assert scheduled.num_scheduled_tokens == {"a": 36}
            assert driver.scheduler.connector.get_num_new_matched_tokens.call_count == 1
            driver.output()
        """,
    )

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines("kvledger: 1 engines watched *, 0 left alone, 0 violations")


def test_what_does_not_fit_is_left_alone_and_said(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_fits(*_: Any) -> Any:
        raise RuntimeError("no adapter for this")

    monkeypatch.setattr("kvledger.audit.entry.pytest_plugin.choose", none_fits)
    result = run(pytester, CLEAN)

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines("kvledger: 1 left alone: RuntimeError: no adapter for this")


def test_classes_are_as_before_when_the_run_is_over(pytester: pytest.Pytester) -> None:
    before = Scheduler.__init__, Scheduler.schedule
    run(pytester, CLEAN)

    assert before == (Scheduler.__init__, Scheduler.schedule)
