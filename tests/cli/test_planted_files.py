"""Nothing under a name that kvledger opens stops a command, the sidecar or the audit of another engine."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.command_line import exit_code
from tests.exporters.sidecar.routed_engines import Fleet
from tests.planted import KINDS, TooLong, limited, plant

from kvledger.audit.errors import LedgerError
from kvledger.audit.replay import checkpoint
from kvledger.exporters.metrics.metric_list import collect
from kvledger.exporters.sidecar.follower import Follower

QUERY = "select count(*) from requests"
COMMANDS = (
    "audit {} --format json",
    "query {} QUERY",
    "why {}",
    "summary {}",
    "summary {} --by engine",
    "blocks {}",
    "prefixes {}",
    "whatif {}",
    "routing {}",
    "ls {}",
    "ls {} --audit",
    "prune {} --older-than 1d",
    "diff {} {}",
    "report {} -o OUT/page.html",
    "export {} -o OUT/tables",
    "export {} --format openmetrics -o OUT/metrics",
    "timeline {} -o OUT/timeline",
    "compact {}",
    "compact {} --keep 1d",
)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two engines, with blocks and recorded KV events."""
    folder = tmp_path_factory.mktemp("healthy")
    fleet = Fleet(folder, 1, lose=False)
    fleet.serve(20)
    fleet.stop()
    return folder


@pytest.fixture(params=KINDS)
def planted(request: pytest.FixtureRequest, healthy: Path, tmp_path: Path) -> Iterator[Path]:
    """The same, with something planted under every name of the journals beside them."""
    folder = tmp_path / "journals"
    shutil.copytree(healthy, folder)
    try:
        plant(folder, KINDS[request.param])
    except PermissionError:
        pytest.skip("only root can make one")
    yield folder
    shutil.rmtree(folder)


def answers(folder: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[object, str]]:
    """The exit code of every command, and what it says."""
    found: dict[str, tuple[object, str]] = {}
    for command in COMMANDS:
        words = command.replace("OUT", str(out)).split()
        code: object = "too long"
        with contextlib.suppress(TooLong), limited():
            code = exit_code(*(word.replace("{}", str(folder)).replace("QUERY", QUERY) for word in words))
        found[command] = code, capsys.readouterr().err
    return found


def test_every_command_answers_as_without_them_and_says_what_it_left_out(
    planted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = answers(planted, tmp_path, capsys)

    assert {} == {command: answer for command, answer in beside.items() if answer[0] not in (1, 3)}
    for code, said in beside.values():
        assert code == 1 or f"Left out: {planted}/engine-2-9-0 " in said


def test_the_sidecar_follows_the_others(healthy: Path, planted: Path) -> None:
    said: list[str] = []
    with limited():
        with contextlib.suppress(LedgerError, OSError):  # its own folder can't be used, and it says so
            Follower(planted, planted / checkpoint.HIDDEN).close()
        follower = Follower(planted, planted / ".state", said.append, fold=False)
        follower.catch_up()
        families = collect(follower.audits)
        follower.save()
        follower.close()

    assert families
    assert all(follower.journals[path.name].shown for path in healthy.glob("engine-*"))
