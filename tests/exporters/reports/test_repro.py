"""`kvledger repro`: which finding it takes, what it writes and prints, and its exit codes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.exporters.repro.workloads import CASES

from kvledger.audit.errors import LedgerError
from kvledger.audit.repro import reproduction
from kvledger.audit.repro.bisect import Run
from kvledger.audit.repro.choose_finding import Ambiguous, Seen
from kvledger.audit.repro.drive import Found
from kvledger.audit.repro.reproduction import OtherRelease, Reproduction
from kvledger.exporters import writers
from kvledger.exporters.reports import repro

CASE = CASES["double-allocation"]
PRIVATE = "chatcmpl-0a5d2f346baa"


def seen(finding: str = "blocks/double-allocation", severity: str = "violation") -> Seen:
    message = f"Request {PRIVATE} has a block twice."
    return Seen(finding, PRIVATE, severity, "engine", "0.23.0", message, 7, 3, 90, 1, Path("j"))


REPRODUCED = Reproduction(
    status="reproduced",
    seen=seen(),
    release="0.23.0",
    workload=CASE.workload,
    check=CASE.check,
    assumed=("The pool has 41 blocks.",),
    messages=("Request r3 has a block twice.",),
    requests_before=200,
    requests_after=3,
    steps_before=1_900,
    steps_after=3,
    seconds=20.5,
    first_seconds=4.25,
    driven=80,
    statement="step   1  life 1  admitted, no local hit   0\n",
    configuration={"blocks": 4096, "drafts": 0, "connector": "NixlConnector", "model": "secret/model"},
)


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls the command with a given reproduction, and a given result of the written file."""

    def call(made: Reproduction | Exception, result: str = "fails", **options: Any) -> int:
        def reproduce(path: Path, **_: Any) -> Reproduction:
            if isinstance(made, Exception):
                raise made
            return made

        monkeypatch.setattr(repro, "choose", lambda *_: seen())
        monkeypatch.setattr(repro, "reproduce", reproduce)
        monkeypatch.setattr(repro, "run_file", lambda *_: Run("0.23.0", result, "4", 1.0))  # type: ignore[arg-type]
        monkeypatch.setattr(repro.workers, "network_open", lambda: "")
        asked: dict[str, Any] = {
            "finding": "",
            "request": "",
            "output": tmp_path / "test_repro.py",
            "issue": None,
            "budget": "120s",
            "any_release": False,
            "scheduler": "",
            "python": "",
            "yes": True,
            "as_json": False,
        }
        made_of_it = repro.run(tmp_path, **asked | options)
        if isinstance(made_of_it, int):
            return made_of_it
        writers.show(made_of_it, "json" if options.get("as_json") else "text")
        return made_of_it.code

    return call


def test_the_test_and_the_bug_report_are_written(
    call: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 0 == call(REPRODUCED, issue=tmp_path / "bug.md")
    test, report = (tmp_path / "test_repro.py").read_text(), (tmp_path / "bug.md").read_text()
    header, _, code = test.partition('\n"""\n')
    assert code.strip() in report
    flowed = " ".join(report.split())
    assert 1 == max(flowed.count(sentence) for sentence in " ".join(header.split()).split(". "))
    for words in (
        "With more than one KV cache group, ",
        "- Where: ",
        "- Upstream: ",
        "    pytest test_repro.py",
    ):
        assert words in header
        assert 1 == report.count(words)
    for words in ("# vLLM 0.23.0: ", "- GPU blocks: 4096", "> Request r3 has a block twice.", "admitted, no"):
        assert words in report
    assert not [words for words in (PRIVATE, "secret") if words in test + report]
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        f"Reproduced: blocks/double-allocation of request {PRIVATE}, with 3 requests and 3 steps" in printed
    )
    for words in (
        "fails on vLLM 0.23.0",
        "in the journal 200 1,900",
        "Assumed: The pool",
        "kvledger repro bisect",
    ):
        assert words in printed


def test_a_dash_prints_the_test_alone_to_standard_output(call: Any, capsys: Any) -> None:
    assert 0 == call(REPRODUCED, output=Path("-"))
    out, err = capsys.readouterr()
    compile(out, "test_repro.py", "exec")
    assert "Reproduced: " in err


def test_a_test_that_does_not_fail_is_not_a_reproduction(call: Any, capsys: Any) -> None:
    assert 1 == call(REPRODUCED, "passes")
    assert "came back under kvledger's driver, but not in the file" in " ".join(
        capsys.readouterr().out.split()
    )


def test_the_test_is_not_run_before_the_user_agrees(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for stdin, code in (
        (io.StringIO("y\n"), 4),
        (Terminal("n\n"), 4),
        (Terminal(""), 4),
        (Terminal("y\n"), 0),
    ):
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stderr", told := Terminal())
            assert code == call(REPRODUCED, yes=False)
        assert (
            "test_repro.py once, without network, in an empty folder, with at most 8 GiB" in told.getvalue()
        )
        printed = " ".join(capsys.readouterr().out.split())
        assert ("was not run: nobody agreed to it. --yes agrees." in printed) == (code == 4)
        assert (tmp_path / "test_repro.py").exists()


def test_a_test_that_the_budget_leaves_no_time_for_is_written_and_not_run(
    call: Any, tmp_path: Path, capsys: Any
) -> None:
    assert 4 == call(REPRODUCED, budget="0.5s")

    assert "was not run to its end: the time was over. Give more with --budget." in " ".join(
        capsys.readouterr().out.split()
    )
    assert (tmp_path / "test_repro.py").exists()


def test_the_budget_is_the_time_of_the_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading takes 3 s, vLLM starts in 20 s, and as long is left for the test that is written."""
    clock = [0.0]
    ends: list[float] = []

    def takes(seconds: float, value: Any) -> Any:
        return lambda *_, **__: clock.__setitem__(0, clock[0] + seconds) or value

    class Search:
        def __init__(self, part: Any, pool: Any, began: float, end: float, progress: Any) -> None:
            ends.append(end)

        def run(self) -> None: ...

    monkeypatch.setattr(reproduction.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(reproduction, "choose", takes(1, seen()))
    monkeypatch.setattr(
        reproduction, "cut", takes(2, SimpleNamespace(configuration={}, requests={}, scheduler_class=""))
    )
    monkeypatch.setattr(reproduction, "require_rebuildable", takes(0, None))
    monkeypatch.setattr(reproduction.Pool, "version", takes(20, "0.23.0"))
    monkeypatch.setattr(reproduction, "_Search", Search)

    reproduction.reproduce(tmp_path, budget=120, workers=0)
    clock[0] = 0.0
    reproduction.reproduce(tmp_path, budget=33, workers=0)
    assert [100.0, 28.0] == ends


def test_not_reproduced_and_refused_have_their_own_exit_codes(call: Any, tmp_path: Path, capsys: Any) -> None:
    near = Found("blocks/leak", "r1", "Request r1 leaks a block.", 4)
    failed = Reproduction(
        status="not reproduced", seen=seen(), release="0.23.0", reason="It needs luck.", nearest=near
    )
    assert 1 == call(failed)
    assert "The nearest that came back: blocks/leak: Request r1 leaks a block." in capsys.readouterr().out
    refused = msgspec.structs.replace(failed, status="refused", reason="It needs a worker.", nearest=None)
    assert 3 == call(refused)
    assert capsys.readouterr().out.startswith("Refused: blocks/double-allocation")
    assert not list(tmp_path.iterdir())


def test_json_has_the_figures_and_no_workload(call: Any, tmp_path: Path, capsys: Any) -> None:
    assert 0 == call(REPRODUCED, as_json=True)
    data = json.loads(capsys.readouterr().out)
    assert ["reproduced", 200, 3, 1900, 3] == [
        data[name] for name in ("status", "requests_before", "requests_after", "steps_before", "steps_after")
    ]
    assert {"result": "fails", "figure": "4"} == data["test"]
    assert str(tmp_path / "test_repro.py") == data["file"]
    assert "workload" not in data


def test_json_and_the_test_do_not_share_standard_output(call: Any) -> None:
    with pytest.raises(LedgerError, match="name a file"):
        call(REPRODUCED, as_json=True, output=Path("-"))


def test_another_release_is_an_error_that_names_the_option(call: Any) -> None:
    with pytest.raises(LedgerError, match="with --any-release"):
        call(OtherRelease("The journal is of vLLM 0.23.0."))


@pytest.mark.parametrize("budget", ["", "soon", "-3s", "0s", "1d"])
def test_a_budget_is_a_length_of_time(call: Any, budget: str) -> None:
    with pytest.raises(LedgerError, match="is no length of time"):
        call(REPRODUCED, budget=budget)


# --- choosing ---------------------------------------------------------------------------------------------

SEVERAL = [
    seen("connector/failed-load-counted", "drift"),
    seen("metrics/prompt-missing", "drift"),
    seen(),
    seen("tokens/negative"),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def choose(monkeypatch: pytest.MonkeyPatch, *, typed: str | None) -> tuple[Seen, str]:
    """The finding taken of several, and what was printed. ``typed`` None: standard input is no terminal."""
    out = Terminal() if typed is not None else io.StringIO()
    monkeypatch.setattr("sys.stdin", Terminal(typed) if typed is not None else io.StringIO())
    monkeypatch.setattr("sys.stderr", out)
    return repro._choose(Ambiguous(SEVERAL).findings), out.getvalue()


def test_violations_are_offered_before_drifts(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, printed = choose(monkeypatch, typed="2\n")
    assert "tokens/negative" == chosen.id
    assert printed.splitlines()[:3] == [
        f"1. blocks/double-allocation: Request {PRIVATE} has a block twice.",
        f"2. tokens/negative: Request {PRIVATE} has a block twice.",
        f"3. connector/failed-load-counted (drift): Request {PRIVATE} has a block twice.",
    ]
    assert "Can't be rebuilt: metrics/prompt-missing" in printed


def test_an_answer_that_is_no_number_of_the_list_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for typed in ("4\n", "tokens/negative\n", ""):
        with pytest.raises(LedgerError, match="is no number from 1 to 3"):
            choose(monkeypatch, typed=typed)


def test_where_nobody_can_answer_the_options_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LedgerError, match="4 findings: choose with --finding or --request"):
        choose(monkeypatch, typed=None)
