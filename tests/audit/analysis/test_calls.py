"""Requests that are one call: of several prompts, and of a prefill and a decode engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.audit.analysis.test_usage import PROMPT, account

from kvledger.audit.analysis.calls import CallAccount, CallRequest, FoundRequests, calls_of, figures

pytest.importorskip("vllm")

from tests.exporters.reports.printed import lines, text
from tests.scenarios.driving import start

from kvledger.audit.entry.attach import attach
from kvledger.audit.replay.journals import statements
from kvledger.exporters.reports.statement import answer_of_call

# --- A client's call of several requests, each prompt counted once; the requests ran on the real scheduler.


TWO_SAMPLES = ("0_cmpl-a-0-0a1b2c3d", "1_cmpl-a-0-0a1b2c3d")


def journal(folder: Path, *calls: tuple[str, ...]) -> Path:
    """The journal of an engine that ran one call after the other; all share a prompt of 50 tokens."""
    driver = start()
    with attach(driver.scheduler) as audit:
        for call in calls:
            for request_id in call:
                driver.add(request_id, 50, 3, shares=("prompt", 50))
            driver.run()
        audit.save(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    calls = (
        TWO_SAMPLES,
        ("cmpl-b-0-00000001", "cmpl-b-1-00000002"),
        ("cmpl-b-0-00000003", "cmpl-b-1-00000004"),
    )
    return journal(tmp_path_factory.mktemp("calls") / "one", *calls)


def calls(folder: Path, asked: str) -> list[list[CallRequest]]:
    return calls_of([each.found for each in statements([folder], asked)], suffixed=True)


def test_a_prompt_of_two_samples_counts_once(folder: Path) -> None:
    (requests,) = calls(folder, "cmpl-a")

    counted = figures(requests)

    assert [0, 48] == [request.cached for request in requests]
    assert (2, 1, 50, 0, 6) == counted[:5]
    assert counted.known


def test_a_used_again_id_makes_two_calls(folder: Path) -> None:
    first, second = calls(folder, "b")

    assert [0, 1] == [each.part.prompt for each in first] == [each.part.prompt for each in second]
    assert (100, 96) == figures(second)[2:4]


def test_an_incomplete_account_makes_the_call_unknown(folder: Path) -> None:
    requests = calls(folder, "a")[0]
    incomplete = replace(requests[0].account, known=False)

    assert not figures([requests[0]._replace(account=incomplete), requests[1]]).known


def test_a_call_is_shown_with_its_requests_and_sum(folder: Path) -> None:
    shown = text(answer_of_call("a", statements([folder], "a")))

    assert " ".join(shown.split()).startswith(
        "Call a: 2 requests for 1 prompt. Each prompt counted once: 50 prompt tokens, of which no sample "
        "computed 0; 6 output tokens."
    )
    assert next(line for line in shown.splitlines() if line.startswith("sum")).split() == [
        "sum", "100", "48", "0", "52", "0", "6",
    ]  # fmt: skip
    twice = text(answer_of_call("b", statements([folder], "b")))
    assert "Call b: 2 requests for 2 prompts, use 1 of 2 of this id" in twice


def test_a_call_as_data(folder: Path) -> None:
    found = statements([folder], "a")

    (call,) = json.loads(json.dumps(answer_of_call("a", found).plain()))["calls"]

    assert 0 == call["counted_once"]["cached"]
    assert [0, 48] == [each["local"] for each in call["requests"]]
    assert 3 == len(lines(answer_of_call("a", found)).splitlines())


# --- requests of a prefill and a decode engine that are one call, and requests that only share an id ------


OUTPUT = 5


def prefill(digits: int = 1, *counts: int, at: int = 1, **more: Any) -> FoundRequests:
    """A request that an engine prefills for another one."""
    one = account(f"cmpl-a-0-{digits:08x}", *counts, output=1, at=at, remote_decode=True, **more)
    return FoundRequests(CallAccount.of(one), "prefill engine", "kv_both")


def decode(digits: int = 2, *counts: int, at: int = 2, **more: Any) -> FoundRequests:
    """A request for which a prefill engine hands KV over."""
    one = account(f"cmpl-a-0-{digits:08x}", *(counts or (0, 96)), at=at, transferred=True, **more)
    return FoundRequests(CallAccount.of(one), "decode engine", "kv_both")


def whole(
    digits: int = 3, *counts: int, engine: str = "a third engine", at: int = 3, **more: Any
) -> FoundRequests:
    """A request that one engine serves, under the same id."""
    one = account(f"cmpl-a-0-{digits:08x}", *counts, at=at, **more)
    return FoundRequests(CallAccount.of(one), engine, "kv_both")


def ids(call: list[CallRequest]) -> list[str]:
    return [each.account.request_id[-1] for each in call]


def paired_calls(*found: FoundRequests) -> list[list[str]]:
    return [ids(call) for call in calls_of(found, suffixed=True)]


def counted(*found: FoundRequests) -> tuple[int, int, int, dict[str, int]]:
    """Prompt, cached and output tokens of the only call, and what it does not count again."""
    (call,) = calls_of(found, suffixed=True)
    once = figures(call)
    accounts = [each.account for each in call]
    handled = sum(each.local + each.external + each.computed + each.output_tokens for each in accounts)
    assert handled == once.prompt_tokens + once.output_tokens + sum(once.not_counted.values())
    return once.prompt_tokens, once.cached, once.output_tokens, once.not_counted


def test_the_prompt_counts_in_the_prefill_engine_and_the_output_in_the_decode_engine() -> None:
    again = {"prefill-output": 1, "transferred": 96, "recomputed": 4}

    assert (PROMPT, 32, OUTPUT, again) == counted(decode(), prefill(1, 32))


def test_hits_of_the_decode_engine_count_as_the_prefill_engine_says() -> None:
    """The decode engine still has 64 tokens, of which the prefill engine computed 32 again."""
    again = {"prefill-output": 1, "transferred": 32, "decode-hit": 64, "recomputed": 4}

    assert (PROMPT, 32, OUTPUT, again) == counted(prefill(1, 32), decode(2, 64, 32))


@pytest.mark.parametrize(
    ("counts", "voided", "transferred"), [((0, 0), {}, 0), ((0, 64), {"failed": 32}, 64)]
)
def test_a_prompt_that_is_computed_after_a_failed_transfer_has_this_cause(
    counts: tuple[int, int], voided: dict[str, int], transferred: int
) -> None:
    *_, again = counted(prefill(), decode(2, *counts, voided=voided))

    assert PROMPT - transferred == again["transfer-failed"]
    assert transferred == again.get("transferred", 0)
    assert "recomputed" not in again


def test_a_decode_engine_that_has_the_prompt_itself_needs_no_transfer() -> None:
    *_, again = counted(prefill(1, 64), decode(2, 96, 0))

    assert {"prefill-output": 1, "decode-hit": 96, "recomputed": 4} == again


def test_a_request_that_only_shares_the_id_is_a_call_of_its_own() -> None:
    assert [["1", "2"], ["3"]] == paired_calls(prefill(), decode(), whole())
    assert [["3"], ["1", "2"]] == paired_calls(prefill(at=2), decode(at=3), whole(at=1))
    assert [["3"], ["4"]] == paired_calls(whole(3, engine="one", output=1), whole(4, engine="other", at=4))


def test_another_prompt_of_the_same_id_is_not_what_was_transferred() -> None:
    other = decode()

    assert [["1"], ["2"]] == paired_calls(
        prefill(), other._replace(account=replace(other.account, prompt_tokens=101))
    )


def test_the_id_that_the_connector_names_is_stronger_than_the_order() -> None:
    first, second = prefill(1, at=1), prefill(2, at=2)
    late = decode(3, at=3, remote_request=first.account.request_id)

    assert [["1", "3"], ["2"]] == paired_calls(first, second, late)


def test_a_prefill_whose_decode_never_came_is_a_call_of_its_own() -> None:
    """The client sent the same id again: both prompts were prefilled, one was decoded."""
    assert [["1"], ["2", "3"]] == paired_calls(prefill(1, at=1), prefill(2, at=2), decode(3, at=3))


def test_roles_of_engines_join_what_no_router_marked() -> None:
    """A shared folder needs no ``kv_transfer_params``; only the engines' roles tell who prefills."""
    first = whole(1, at=1, output=1, engine="p")._replace(kv_role="kv_producer")
    second = whole(2, 0, 64, at=2, engine="d")._replace(kv_role="kv_consumer")

    assert (PROMPT, 0, OUTPUT) == counted(first, second)[:3]
    assert [["1"], ["2"]] == paired_calls(
        first._replace(kv_role="kv_both"), second._replace(kv_role="kv_both")
    )
    assert 64 == counted(second)[1]


def test_samples_of_two_engines() -> None:
    """Each engine has two samples of the prompt, and the prefill engine's second one hits."""
    requests = [
        each._replace(account=replace(each.account, request_id=f"{sample}_{each.account.request_id}"))
        for sample in range(2)
        for each in (prefill(1, 96 * sample, at=1 + 2 * sample), decode(2, at=2 + 2 * sample))
    ]
    again = {"another-sample": 100, "prefill-output": 2, "transferred": 192, "recomputed": 8}

    assert (PROMPT, 0, 2 * OUTPUT, again) == counted(*requests)
