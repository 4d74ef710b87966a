"""What became before of the contents that a prompt missed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.observed import observe
from tests.scenarios.driving import Attach, Driver, start

from kvledger.audit.engines import prompt_reports
from kvledger.audit.engines.prompt_reports import MOST, PromptSample
from kvledger.audit.events import Admitted


@pytest.fixture(autouse=True)
def every_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """All contents are in the sample."""
    monkeypatch.setattr(prompt_reports, "MASK", 0)


def missed(scenario: Any, level: str = "tokens") -> list[list[int] | None]:
    """What the first admission of each request missed: never seen, evicted, reset, being computed."""
    _, events = observe(scenario, level)
    return [event.sampled_misses for event in events if isinstance(event, Admitted) and not event.resumed]


@pytest.mark.parametrize("level", ["tokens", "blocks"])
def test_a_prompt_that_was_evicted_is_told_from_one_that_was_never_seen(level: str) -> None:
    def scenario(attach: Attach) -> Driver:
        driver = start(attach, blocks=20)
        for name, shares in (("a", None), ("hit", ("a", 64)), ("other", None), ("again", ("a", 64))):
            driver.add(name, 288 if name == "other" else 64, 2, shares=shares)
            driver.run()
        return driver

    assert [[3, 0, 0, 0], None, [17, 0, 0, 0], [0, 3, 0, 0]] == missed(scenario, level)


def test_a_reset_of_the_cache_is_told_from_an_eviction() -> None:
    def scenario(attach: Attach) -> Driver:
        driver = start(attach)
        driver.add("a", 64, 2)
        driver.run()
        driver.reset_prefix_cache()
        driver.add("b", 80, 2, shares=("a", 64))
        driver.run()
        return driver

    assert [[3, 0, 0, 0], [0, 0, 4, 0]] == missed(scenario)


def test_outputs_are_contents_too() -> None:
    def scenario(attach: Attach) -> Driver:
        driver = start(attach, blocks=20)
        turn = driver.add("a", 32, 40)
        driver.run()
        driver.add("other", 288, 2)
        driver.run()
        driver.add("b", list(turn.all_token_ids), 2)
        driver.run()
        return driver

    assert [0, 4, 0, 0] == missed(scenario)[-1]


def test_a_prompt_that_was_aborted_before_its_first_step_was_never_cached() -> None:
    def scenario(attach: Attach) -> Driver:
        driver = start(attach, max_batched_tokens=64)
        driver.add("a", 200, 2)
        driver.step()
        driver.abort("a")
        driver.reset_prefix_cache()
        driver.add("b", 200, 2, shares=("a", 200))
        driver.run()
        return driver

    assert [8, 0, 4, 0] == missed(scenario)[-1]


def sampled() -> tuple[PromptSample, dict[str, Any]]:
    """A sample of blocks of one token, and the living requests."""
    requests: dict[str, Any] = {}
    manager = SimpleNamespace(block_pool=SimpleNamespace(hash_block_size=1))
    return PromptSample(SimpleNamespace(requests=requests, kv_cache_manager=manager, block_size=1)), requests


def request(name: str, blocks: int, computed: int = 0) -> Any:
    """A request with a prompt of so many full blocks, and one token more."""
    hashes = [number.to_bytes(9, "big") for number in range(blocks)]
    known = {"num_prompt_tokens": blocks + 1, "num_computed_tokens": computed, "block_hashes": hashes}
    return SimpleNamespace(request_id=name, **known)


def test_contents_that_another_request_computes_have_a_cause_of_their_own() -> None:
    sample, requests = sampled()
    requests["a"] = request("a", 12, computed=8)
    sample.admitted(requests["a"], 0)

    assert [0, 2, 0, 4] == sample.admitted(request("b", 12), 6)


def test_the_sample_is_bounded() -> None:
    sample, _ = sampled()

    assert [MOST + 10, 0, 0, 0] == sample.admitted(request("a", MOST + 10), 0)
    assert MOST == len(sample._seen)
