"""The drifts of figures on the real scheduler, against what the engine itself counts.

Each test reads the engine's own figure and compares it with the definition. The expected figures come from
what the driver did, not from the ledger. ``test_scenarios.py`` has every drift of every scenario.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.observed import audited, drifts, findings, observe
from tests.scenarios import corpus, external, figures, workloads
from tests.scenarios.driving import Attach, Driver, start

from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.engines import host_version
from kvledger.audit.release_semantics import release

HERE = release(host_version())


class Statistics:
    """Sums of the statistics that the engine sends to its front end."""

    def __init__(self, driver: Driver) -> None:
        self.local = [0, 0, 0]
        self.external = [0, 0, 0]
        self.drafts = [0, 0]
        """Draft tokens and accepted ones, as the engine counts them."""
        self.proposed = 0
        """Draft tokens scheduled for requests that had run before in their life."""
        self._driver = driver
        driver.schedule = self._proposing(driver.schedule)  # type: ignore[method-assign]
        driver.output = self._counting(driver.output)  # type: ignore[method-assign]

    def _proposing(self, schedule: Any) -> Any:
        def wrapped() -> Any:
            scheduled = schedule()
            step = self._driver.in_flight[-1]
            for name, drafts in scheduled.scheduled_spec_decode_tokens.items():
                self.proposed += 0 if name in step.admitted else len(drafts)
            return scheduled

        return wrapped

    def _counting(self, output: Any) -> Any:
        def wrapped(**of_output: Any) -> Any:
            outputs = output(**of_output)
            for of_client in outputs.values():
                if of_client.scheduler_stats is not None:
                    self._add(of_client.scheduler_stats)
            return outputs

        return wrapped

    def _add(self, stats: Any) -> None:
        _sum(self.local, stats.prefix_cache_stats)
        _sum(self.external, stats.connector_prefix_cache_stats)
        if stats.spec_decoding_stats is not None:
            self.drafts[0] += stats.spec_decoding_stats.num_draft_tokens
            self.drafts[1] += stats.spec_decoding_stats.num_accepted_tokens


def _sum(sums: list[int], stats: Any) -> None:
    """Add the exported part of lookup statistics."""
    if stats is not None:
        for place, value in enumerate((stats.requests, stats.queries, stats.hits)):
            sums[place] += value


def counted(
    monkeypatch: pytest.MonkeyPatch, scenario: Any, **setup: Any
) -> tuple[Driver, Statistics, Auditor]:
    """Run a scenario; return what its engine counted and the audit."""
    made: list[Statistics] = []
    original = Driver.__init__

    def build(driver: Driver, *arguments: Any, **options: Any) -> None:
        original(driver, *arguments, **options)
        made.append(Statistics(driver))

    monkeypatch.setattr(Driver, "__init__", build)
    driver, events = observe(scenario, **setup)
    auditor = audited(events)
    assert findings(auditor) <= {("connector/handed-unloaded", None)}
    assert "clean" == auditor.verdict
    return driver, made[0], auditor


def test_a_request_with_prompt_logprobs_counts_in_one_cache_and_not_in_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the definition only the first request counts: 150 tokens, 96 of them in the connector's store."""
    _, statistics, auditor = counted(monkeypatch, figures.prompt_logprobs, connector="scripted")

    assert 150 == statistics.local[1]
    assert 150 + 150 == statistics.external[1]
    assert "lookup-exempt-counted" in drifts(auditor)


def test_an_engine_without_a_prefix_cache_exempts_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    _, statistics, auditor = counted(monkeypatch, external.external_sync, prefix_caching=False)

    assert [0, 0, 0] == statistics.local
    assert statistics.external[1] > 0
    assert "lookup-exempt-counted" not in drifts(auditor)


@pytest.mark.skipif(HERE < (0, 27), reason="no padding")
def test_padding_counts_as_proposed_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter proposes nothing for a request that has had no output."""
    _, statistics, auditor = counted(monkeypatch, figures.padded_decode, drafts=3)
    finding = next(v for v in auditor.violations if v.id == "metrics/padding-as-drafts")

    assert 3 == finding.figures["padding_tokens"]
    assert statistics.proposed + 3 == statistics.drafts[0]


def test_a_stop_within_accepted_drafts_leaves_them_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three are accepted, and the output has the first output token and two of them."""
    driver, statistics, auditor = counted(monkeypatch, figures.stop_within_drafts)
    output = sum(len(each.new_token_ids) for each in driver.delivered["r"])

    assert (3, 3) == (statistics.drafts[1], output)
    assert {"drafts-past-stop"} == drifts(auditor)


def test_a_stop_at_the_last_accepted_draft_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(attach: Attach) -> Driver:
        driver = start(attach, drafts=3)
        driver.add("r", 50, 20, stop_at=4)
        driver.step()
        driver.step(accepted=3)
        driver.run()
        return driver

    _, statistics, auditor = counted(monkeypatch, scenario)

    assert 3 == statistics.drafts[1]
    assert set() == drifts(auditor)


def test_the_lookups_of_an_abort_in_remote_wait_stay_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    _, statistics, auditor = counted(monkeypatch, corpus.HISTORIES["aborted while waiting for remote KV"])

    assert [1, 300 - 64, 128] == [
        statistics.external[0] - 1,
        statistics.external[1] - 64,
        statistics.external[2],
    ]
    assert {"lookup-never-ran"} == drifts(auditor)


def test_a_load_that_fails_completely_counts_its_hits_and_a_second_lookup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the definition: one lookup, 200 tokens queried, none hit."""
    title = "asynchronous load fails wholly, looked up anew"
    _, statistics, auditor = counted(monkeypatch, corpus.HISTORIES[title])

    assert [2, 400, 160] == statistics.external
    assert {"lookup-load-failed", "lookup-never-ran"} <= drifts(auditor)


def test_lookups_after_a_preemption_are_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    title = "preempted in decode, resumed from the cache"
    _, statistics, auditor = counted(monkeypatch, corpus.HISTORIES[title])

    assert [1, 64, 0] == statistics.local, "the second admission hit 64 tokens"
    assert {"lookup-resumed-missing"} == drifts(auditor)


def test_a_preemption_in_prefill_is_reported_by_its_first_admission() -> None:
    """Settled: 104 external and 96 computed tokens."""
    driver, events = observe(corpus.HISTORIES["vLLM#36752: preempted in mid-prefill, asked again"])
    stats = driver.prefill_stats("r")

    if stats is None:
        pytest.skip("no prefill_stats")
    assert 200 == stats.num_local_cached_tokens + stats.num_external_cached_tokens + stats.num_computed_tokens
    assert 104 != stats.num_external_cached_tokens
    assert "later-source-missing" in drifts(audited(events))


def test_prompt_tokens_computed_twice_are_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, _, auditor = counted(monkeypatch, figures.preempted_in_prefill)
    (account,) = auditor.ledger.accounts()

    assert 150 == driver.prefill_stats("r").num_computed_tokens
    assert 64 == sum(account.rework.values())
    assert {"recomputed-prompt-missing", "chunks-in-one-step", "lookup-resumed-missing"} == drifts(auditor)


def test_a_full_external_hit_reports_no_computed_token(monkeypatch: pytest.MonkeyPatch) -> None:
    title = "full external hit, last token executed again"
    driver, _, auditor = counted(monkeypatch, corpus.HISTORIES[title])

    assert 0 == driver.prefill_stats("r").num_computed_tokens
    assert 1 == auditor.ledger.totals().scheduled
    assert {"full-hit-token-missing"} == drifts(auditor)


@pytest.mark.skipif(HERE < (0, 20), reason="each chunk is reported with the whole sequence")
def test_the_later_chunks_of_a_session_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, _, auditor = counted(monkeypatch, workloads.session)
    reports = [each.prefill_stats for each in driver.delivered["s"] if each.prefill_stats is not None]
    finding = next(v for v in auditor.violations if v.id == "metrics/session-chunk-missing")

    assert [40] == [stats.num_prompt_tokens for stats in reports]
    assert ("s", 1) == (finding.request, finding.repeats)


def test_a_prompt_that_is_aborted_before_its_first_output_is_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, statistics, auditor = counted(monkeypatch, figures.abort_before_output, connector="scripted")

    assert driver.prefill_stats("prefill") is None
    assert 200 + 150 == statistics.local[1]
    assert {"prompt-missing", "lookup-never-ran"} == drifts(auditor)


def test_tokens_handed_over_are_reported_as_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, _, auditor = counted(
        monkeypatch, figures.handed_over, connector="scripted", kv_role="kv_consumer"
    )

    assert 160 == driver.prefill_stats("r").num_cached_tokens
    assert {"transfer-as-cached"} == drifts(auditor)


def test_a_local_hit_that_a_failed_load_made_invalid_is_reported_as_local() -> None:
    driver, events = observe(figures.local_hit_fails, connector="scripted")
    auditor = audited(events)
    account = auditor.ledger.account("r")

    assert account is not None and account.settled is not None
    assert (64, 32) == (driver.prefill_stats("r").num_local_cached_tokens, account.settled.local)
    assert "failed-hit-reported" in drifts(auditor)


def test_two_samples_count_the_prompt_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    _, statistics, auditor = counted(monkeypatch, figures.samples_of_one_request)

    assert 2 * 60 == statistics.local[1]
    assert {"samples-counted-each"} == drifts(auditor)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ordinary_requests_have_no_drift(asynchronous: bool) -> None:
    """Hits, a stop, and prompts of one step: every figure is what it is defined to be."""
    for scenario in (workloads.plain, workloads.shared_prefix):
        _, events = observe(scenario, asynchronous=asynchronous)

        assert set() == drifts(audited(events))
