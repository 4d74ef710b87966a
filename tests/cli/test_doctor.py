"""``kvledger doctor``: what it says of an environment, on stand-ins for vLLM and on the real one."""

from __future__ import annotations

import csv
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engines.stand_ins import stand_in

from kvledger import cli
from kvledger.audit import engines
from kvledger.audit.checks.registry import catalogue
from kvledger.audit.engines.v1_012 import V1Observer012
from kvledger.audit.entry import doctor


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command in this process; its exit code and output."""

    def call(*words: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["kvledger", "doctor", *words])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return left.value.code, capsys.readouterr().out

    return call


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """vLLM 0.12 as far as signatures go, and a folder to write to."""
    monkeypatch.setenv("KVLEDGER_DIR", str(tmp_path / "journals"))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(engines, "host_version", lambda: "0.12.0.post2")
    monkeypatch.setattr(engines, "bare_scheduler", lambda: stand_in(V1Observer012))
    seam = SimpleNamespace(get_scheduler_cls=None)
    monkeypatch.setattr(engines, "scheduler_config", lambda: seam)
    return seam


def test_an_engine_that_would_be_observed_is_0(run: Any, host: Any) -> None:
    code, told = run()

    assert 0 == code
    assert "v1-0.12" in told
    assert told.startswith("An engine started here would be observed.\n")


def test_the_json_holds_every_invariant_once_or_with_a_reason(run: Any, host: Any) -> None:
    code, told = run("--json")
    found = json.loads(told)

    assert 0 == code
    assert found["observed"] is True
    assert set(catalogue()) == {*found["checked"], *found["not_checked"]}
    assert "tokens/set-once" in found["not_checked"]
    assert set(found["checked_in_part"]) < set(found["checked"])
    assert all(found["not_checked"].values())


def test_the_csv_has_a_line_an_invariant(run: Any, host: Any) -> None:
    code, told = run("--format", "csv")
    lines = list(csv.DictReader(told.splitlines()))

    assert 0 == code
    assert set(catalogue()) == {line["name"] for line in lines if line["topic"] in ("checked", "not_checked")}
    assert all(line["says"] for line in lines if line["topic"] == "not_checked")


def test_without_a_folder_nothing_would_be_observed(
    run: Any, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVLEDGER_DIR")
    code, told = run()

    assert 1 == code
    assert "KVLEDGER_DIR is not set" in told


def test_a_folder_that_cannot_be_made_is_told(
    run: Any, host: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVLEDGER_DIR", str(tmp_path / "file" / "journals"))
    code, told = run("--json")

    assert 1 == code
    assert "no folder" in json.loads(told)["problems"][0]


def test_a_plugin_that_vllm_is_told_to_leave_out_is_told(
    run: Any, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "others,than_ours")
    code, told = run()

    assert 1 == code
    assert "leaves kvledger out" in told


def test_an_unknown_release_is_told_with_what_differs(
    run: Any, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = stand_in(V1Observer012)
    del type(scheduler).add_request
    monkeypatch.setattr(engines, "bare_scheduler", lambda: scheduler)
    code, told = run("--json")
    found = json.loads(told)

    assert 1 == code
    assert found["adapter"] is None
    assert "add_request is missing" in found["problems"][0]


def test_a_release_whose_scheduler_is_out_of_reach_is_told(run: Any, host: Any) -> None:
    del host.get_scheduler_cls
    code, told = run("--json")

    assert 1 == code
    assert "kvledger.attach" in json.loads(told)["problems"][0]


def test_without_vllm_it_says_so(run: Any, host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> str:
        raise ModuleNotFoundError("No module named 'vllm'")

    monkeypatch.setattr(engines, "host_version", absent)
    code, told = run("--json")
    found = json.loads(told)

    assert 1 == code
    assert [None, [], []] == [found["versions"]["vllm"], found["hooks"], found["checked"]]
    assert "vLLM can't be imported" in found["problems"][0]


def test_no_engine_is_started(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("an engine was started")

    scheduler = stand_in(V1Observer012)
    monkeypatch.setattr(type(scheduler), "__init__", started)
    monkeypatch.setattr(engines, "bare_scheduler", lambda: scheduler)

    assert doctor.diagnose().observed


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_on_the_vllm_that_is_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVLEDGER_DIR", str(tmp_path))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    found = doctor.diagnose()

    assert [] == found.problems
    assert engines.host_version() == found.versions["vllm"]
    assert "connector.get_num_new_matched_tokens" in found.hooks
