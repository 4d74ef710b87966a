"""What a generated file can't do: reach a server, take all memory, run for ever, or leave anything behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvledger.audit.errors import LedgerError
from kvledger.audit.repro import launcher, workers

SECONDS = 20.0


def ran(code: str, limit: float = SECONDS) -> workers.Ended:
    return workers.run([sys.executable, "-c", code], limit)


@pytest.fixture
def server() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found.getsockname()[1]


def connects(port: int) -> str:
    return f"import socket\nsocket.socket().connect(('127.0.0.1', {port}))\nprint('reached')"


def test_no_server_of_this_machine_is_reached(server: int) -> None:
    if workers.network_open():
        pytest.skip(workers.network_open())
    ended = ran(connects(server))
    assert "OSError: [Errno 101] Network is unreachable" in ended.err


def test_where_the_network_stays_open_the_user_is_told(server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "network_open", lambda: "Operation not permitted")
    assert "reached" in ran(connects(server)).out
    assert workers.bounds().startswith(
        "with your network, which can't be closed here (Operation not permitted), in an empty folder"
    )


def test_a_network_that_can_not_be_closed_after_all_is_no_reason_to_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launcher, "close_network", lambda: "Operation not permitted")
    with pytest.raises(SystemExit, match="could not be closed: Operation not permitted"):
        launcher.main(["closed", "1", "1", "1", "true"])


def test_memory_is_bounded() -> None:
    ended = ran(f"bytes({workers.MEMORY_BYTES})")
    assert (1, "MemoryError") == (ended.code, ended.err.strip().splitlines()[-1])
    assert 0 == ran("bytes(1 << 20)").code


def test_output_is_bounded() -> None:
    ended = ran("while True: print('x' * 65_536)")
    assert "File too large" in ended.err
    assert len(ended.out) <= workers.READ_BYTES


def test_what_it_began_ends_with_it(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    ended = ran(f"import os, time\nif not os.fork():\n  time.sleep(1.5)\n  open({str(mark)!r}, 'w')")
    assert 0 == ended.code
    time.sleep(2)
    assert not mark.exists()


def test_it_begins_in_an_empty_folder_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLEDGER_DIR", "/journals")
    ended = ran("import os\nprint(os.getcwd(), os.path.expanduser('~'), os.listdir(), *os.environ)")
    place, home, files, *names = ended.out.split()
    assert (place, "[]") == (home, files)
    assert not Path(place).exists()
    assert "KVLEDGER_DIR" not in names


def test_an_interpreter_may_be_named_relative_to_the_callers_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    assert 0 == workers.run(["./python", "-c", "pass"]).code
    with pytest.raises(LedgerError, match="none/python can't be run"):
        workers.run(["none/python"])


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_a_user_without_rights_closes_the_network_where_the_kernel_allows_it(server: int) -> None:
    code = (
        f"import os, socket, sys\nsys.path.insert(0, {str(workers.LAUNCHER.parent)!r})\nimport launcher\n"
        "os.setgid(65534)\nos.setuid(65534)\nprint(launcher.close_network() or 'closed')\n" + connects(server)
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if ended.stdout.split("\n")[0] != "closed":
        pytest.skip(ended.stdout)
    assert "Network is unreachable" in ended.stderr
