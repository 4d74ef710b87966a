"""Nothing under a name that kvledger opens stops a command, the sidecar or the audit of another engine."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.command_line import exit_code
from tests.exporters.sidecar.routed_engines import Fleet
from tests.planted import KINDS, OF_ROOT, plant
from tests.time_limits import TooLong, limited

from kvledger.audit.errors import LedgerError
from kvledger.audit.replay import checkpoint
from kvledger.audit.replay.atomic_files import FOLDER
from kvledger.exporters.facts.compact import compact
from kvledger.exporters.metrics.metric_list import collect
from kvledger.exporters.sidecar.follower import Follower

NOBODY = 65_534
QUERY = "select count(*) from requests"
COMMANDS = (
    "audit {} --format json",
    "query {} QUERY",
    "why {}",
    "summary {}",
    "summary {} --by engine",
    "summary blocks {}",
    "summary prefixes {}",
    "why turns {}",
    "whatif {}",
    "check routing {}",
    "journals {}",
    "journals {} --audit",
    "journals prune {} --older-than 1d",
    "diff {} {}",
    "export html {} -o OUT/page.html",
    "export {} -o OUT/tables",
    "export timeline {} -o OUT/timeline",
    "show {} r-3-0",
    "audit follow {} --format json",
    "journals compact {}",
    "journals compact {} --keep 1d",
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


def answers(folder: Path, out: Path) -> dict[str, tuple[object, str]]:
    """The exit code of every command, and what it says."""
    found: dict[str, tuple[object, str]] = {}
    for command in COMMANDS:
        words = command.replace("OUT", str(out)).split()
        code: object = "too long"
        with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.suppress(TooLong), limited():
            code = exit_code(*(word.replace("{}", str(folder)).replace("QUERY", QUERY) for word in words))
        found[command] = code, said.getvalue()
    return found


def test_every_command_answers_as_without_them_and_says_what_it_left_out(
    healthy: Path, tmp_path: Path
) -> None:
    """All kinds take turns: every kind and every name is there for every command."""
    folder = Path(shutil.copytree(healthy, tmp_path / "journals"))
    makers = [make for make in KINDS.values() if os.geteuid() == 0 or make not in OF_ROOT]
    plant(folder, *makers)
    beside = answers(folder, tmp_path)

    assert {} == {command: answer for command, answer in beside.items() if answer[0] not in (1, 3)}
    for code, said in beside.values():
        assert code == 1 or f"Left out: {folder}/engine-2-9-0 " in said
    shutil.rmtree(folder)


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
    assert follower.health.unreadable and any("engine-2-9-0" in problem for problem in follower.problems)
    assert all(follower.journals[path.name].shown for path in healthy.glob("engine-*"))


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """Everything inside is done by a user who owns nothing here."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


class Shared(NamedTuple):
    """Journals that every user may read, which a sidecar and a compaction of root keep files beside."""

    folder: Path
    before: dict[str, tuple[object, str]]
    """What every command answers to root."""

    def answers_to_another_user(self, out: str) -> dict[str, tuple[object, str]]:
        place = self.folder.parent / out
        place.mkdir()
        place.chmod(0o777)
        with another_user():
            return answers(self.folder, place)


@pytest.fixture(scope="module")
def shared(healthy: Path) -> Iterator[Shared]:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        folder = Path(shutil.copytree(healthy, Path(name, "journals")))
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        for journal in folder.glob("engine-*"):
            assert "" == compact(journal).problem
        follower = Follower(folder, folder / checkpoint.HIDDEN)
        follower.catch_up()
        follower.close()
        Path(name, "out").mkdir()
        # This imports what commands import, too: another user may not read it.
        yield Shared(folder, answers(folder, Path(name, "out")))


def test_the_files_of_root_stop_no_other_user(shared: Shared) -> None:
    """A command that reads kept rows says that it may not look for those of journals that are gone."""
    refused = {command for command in COMMANDS if command.startswith("journals compact")}
    for command, (code, said) in shared.answers_to_another_user("another").items():
        unknown = f"{shared.folder / FOLDER} can't be read (Permission denied): " in said
        expected = 3 if command in refused else shared.before[command][0] or (3 if unknown else 0)
        assert expected == code, command


def test_a_journal_of_another_user_is_left_out(shared: Shared) -> None:
    other = min(shared.folder.glob("engine-*"))
    other.chmod(0o700)
    after = shared.answers_to_another_user("without")
    other.chmod(0o755)

    assert {} == {command: answer for command, answer in after.items() if answer[0] not in (1, 3)}
    for command, (code, said) in after.items():
        assert code == 1 or f"Left out: {other} can't be read: Permission denied." in said, command
