"""``kvledger doctor faults``, and what ``kvledger explain`` says of a fault."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable

import pytest
from tests.command_line import exit_code

from kvledger.audit.entry import doctor
from kvledger.audit.faults.catalogue import catalogue

Run = Callable[..., tuple[object, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process; its exit code, output and standard error."""

    def call(*words: str) -> tuple[object, str, str]:
        code = exit_code(*words)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def test_a_release_begins_with_how_many_faults_it_has(run: Run) -> None:
    code, out, _ = run("doctor", "faults", "--vllm", "0.18.1")

    assert 0 == code
    assert out.startswith("vLLM 0.18.1: 29 faults and 17 drifts known.\n")


def test_a_fault_has_its_condition_releases_finding_and_link(run: Run) -> None:
    out = run("doctor", "faults", "--lmcache", "0.3.9")[1]

    assert (
        "promise-not-loaded: the connector promises tokens to a resumed request and does not load them "
        "if LMCacheConnectorV1 is the connector and a request is preempted "
        "0.3.9, fixed in 0.3.11; found by connector/promise-not-loaded "
        "https://github.com/LMCache/LMCache/issues/1969"
    ) in " ".join(out.split())


def test_a_finding_names_the_level_that_it_needs(run: Run) -> None:
    assert "blocks/double-allocation (level blocks)" in run("doctor", "faults", "--vllm", "0.23.0")[1]


def test_both_products_can_be_asked_for(run: Run) -> None:
    out = run("doctor", "faults", "--vllm", "0.32.0", "--lmcache", "0.5.6", "--format", "json")[1]

    assert [("vllm", "0.32.0"), ("lmcache", "0.5.6")] == [
        (each["product"], each["release"]) for each in json.loads(out)
    ]


def test_the_csv_has_one_line_per_fault(run: Run) -> None:
    rows = {
        row["id"]: row
        for row in csv.DictReader(
            run("doctor", "faults", "--vllm", "0.18.1", "--format", "csv")[1].splitlines()
        )
    }

    row = rows["negative-local-hit"]
    assert ("0.18.1", "fault", "has", "0.20.0") == (row["release"], row["kind"], row["state"], row["fixed"])
    assert "tokens/negative tokens/source-sum tokens/set-once" == row["findings"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--vllm", "abc"), "'abc' is no release of vLLM; write it as in 0.33.0."),
        (("--lmcache", "5"), "'5' is no release of LMCache; write it as in 0.5.7rc2."),
        (
            ("--vllm", "0.40.0"),
            "Nothing is known of vLLM 0.40.0: releases from 0.9.1 to 0.33.0 were examined.",
        ),
    ],
)
def test_an_unknown_release_is_one_sentence(run: Run, words: tuple[str, ...], sentence: str) -> None:
    code, out, err = run("doctor", "faults", *words)

    assert (2, "") == (code, out)
    assert sentence in err
    assert 1 == len(err.splitlines())


def test_without_options_the_installed_releases_are_listed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed", lambda: {"vllm": "0.24.0", "lmcache": "0.4.2"})
    out = run("doctor", "faults")[1]

    assert out.startswith("vLLM 0.24.0: ")
    assert "\nLMCache 0.4.2: 2 faults known.\n" in out


def test_an_installed_release_that_was_never_examined_is_not_called_free_of_faults(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "installed", lambda: {"vllm": "0.40.0"})
    code, out, _ = run("doctor", "faults")
    data = json.loads(run("doctor", "faults", "--format", "json")[1])

    assert 0 == code
    assert out.startswith("Nothing is known of vLLM 0.40.0: ")
    assert [False] == [each["examined"] for each in data]


def test_where_nothing_is_installed_all_faults_are_listed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed", dict)
    rows = csv.DictReader(run("doctor", "faults", "--format", "csv")[1].splitlines())

    assert set(catalogue()) == {row["id"] for row in rows}


def test_no_line_is_wider_than_a_terminal_unless_it_is_a_link(run: Run) -> None:
    assert all(
        len(line) <= 100 or "https://" in line
        for line in run("doctor", "faults", "--vllm", "0.18.1")[1].splitlines()
    )


def test_explain_of_a_finding_names_the_faults_that_it_finds(run: Run) -> None:
    out = " ".join(run("explain", "tokens/negative")[1].split())

    assert (
        "ended-before-it-ran: a request that ends before its first step is counted with -1 cached tokens. "
        "vLLM 0.17.0 to 0.19.1, fixed in 0.20.0." in out.partition("Known faults that it finds: ")[2]
    )


@pytest.mark.parametrize("id", catalogue())
def test_explain_prints_a_fault_whole(run: Run, id: str) -> None:
    code, out, _ = run("explain", id)

    assert 0 == code
    assert out.startswith(f"{id} (")
    assert catalogue()[id].text in " ".join(out.split())
    assert all(len(line) <= 100 for line in out.splitlines())


def test_a_fault_that_is_misspelled_is_suggested(run: Run) -> None:
    assert "did you mean placeholder-leak?" in run("explain", "placeholder-leek")[2]
