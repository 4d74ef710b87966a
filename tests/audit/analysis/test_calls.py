"""A client's call of several requests, each prompt counted once; the requests ran on the real scheduler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.exporters.reports.printed import lines, text
from tests.scenarios.driving import start

from kvledger.audit.analysis.calls import CallRequest, calls_of, figures
from kvledger.audit.entry.attach import attach
from kvledger.audit.replay.journals import statements
from kvledger.exporters.reports.statement import answer_of_call

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
    requests: list[Any] = calls(folder, "a")[0]
    open_one = requests[0].account.__class__(
        **{name: getattr(requests[0].account, name) for name in requests[0].account.__struct_fields__}
        | {"settlements": []}
    )

    assert not figures([requests[0]._replace(account=open_one), requests[1]]).known


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
