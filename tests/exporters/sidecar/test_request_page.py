"""The sidecar's page of one request: the account as ``kvledger show`` prints it."""

from __future__ import annotations

import base64
import html
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from msgspec.structs import replace
from tests import journals
from tests.exporters.sidecar.test_http_server import Answer, Client, served
from tests.histories import events
from tests.time_limits import HANGS

from kvledger.audit.events import Event, Finished, RequestAdded
from kvledger.audit.replay.parallel import size_bytes
from kvledger.exporters.sidecar import http_server, processes
from kvledger.exporters.sidecar.processes import AccountReader

HOSTILE = "<script>alert(1)</script>"
TWICE = "cmpl-twice-0"


def named(request_id: str, *, ended: bool = True) -> list[Event]:
    """The clean history under another id."""
    stream = [
        replace(each, request_id=request_id) if isinstance(each, RequestAdded) else each
        for each in events(200, journals.CLEAN)
    ]
    return [each for each in stream if ended or not isinstance(each, Finished)]


@pytest.fixture(autouse=True, scope="module")
def patient() -> Iterator[None]:
    """A reader may take as long as a busy machine needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "SHOW_SECONDS", 120.0)
        yield


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("journals of engines")
    journals.write(folder / "engine-0", named("cmpl-ended-0"))
    journals.write(folder / "engine-1", named("cmpl-open-0", ended=False), stopped=False)
    journals.write(folder / "engine-2", named(TWICE), configuration={"model": "small"})
    journals.write(folder / "engine-3", named(TWICE), configuration={"model": "large"}, version="0.33.0")
    journals.write(folder / "engine-4", named(HOSTILE))
    with served(folder) as client:
        yield client


def ask(client: Client, request_id: str, journal: str = "") -> Answer:
    return client.get(f"/request?{urlencode({'id': request_id, 'journal': journal})}")


def account(answer: Answer) -> str:
    """What the page shows of an account."""
    found = re.search(r"<pre>(.*)</pre>", answer.text, re.DOTALL)
    assert found, answer.text
    return html.unescape(found[1])


@pytest.mark.parametrize(("asked", "says"), [("cmpl-ended-0", "closed after"), ("cmpl-open", "still open")])
def test_the_account_is_that_of_show(client: Client, asked: str, says: str) -> None:
    """Of a request that has ended, and of an open one by the id that its client knows."""
    answer = ask(client, asked)

    command = [sys.executable, "-m", "kvledger", "show", str(client.follower.path), asked]
    environment = {**os.environ, "COLUMNS": ""}
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert 200 == answer.status
    assert printed == account(answer)
    assert says in printed


def test_an_id_in_two_engines(client: Client) -> None:
    """Both requests are listed; a visitor who chooses an engine gets the account of its request."""
    both, one = account(ask(client, TWICE)), account(ask(client, TWICE, "engine-3"))

    assert f"Call {TWICE}: 1 request for 1 prompt, use 1 of 2 of this id." in both
    assert f"Account of {TWICE}:" in one
    assert "on vllm 0.33.0 pid 4000" in " ".join(one.split())


@pytest.mark.parametrize(
    ("asked", "journal", "status", "says"),
    [
        ("cmpl-nothing", "", 404, "is called 'cmpl-nothing'; there are "),
        ("--help", "", 404, "is called '--help'; there are "),
        ("a\0b\n\x1b[31m", "", 404, r"is called 'a\\x00b\\n\\x1b[31m'; there are "),
        ("é" * 5000, "", 404, "is called 'ééé"),
        ("cmpl-ended-0", "../../etc", 404, "There is no such journal any more; choose another one."),
        (" ", "", 200, "Any id that the client knows"),
    ],
)
def test_what_is_not_found_is_a_sentence(
    client: Client, asked: str, journal: str, status: int, says: str
) -> None:
    answer = ask(client, asked, journal)

    assert (status, True) == (answer.status, says in html.unescape(answer.text)), answer.text
    assert "<pre>" not in answer.text


def test_a_hostile_id_is_escaped(client: Client) -> None:
    found, missed = ask(client, HOSTILE), ask(client, '"><img src=x onerror=alert(1)>')

    assert (200, 404) == (found.status, missed.status)
    assert HOSTILE in account(found)
    assert "<script" not in found.text + missed.text
    assert "<img" not in missed.text


def test_a_second_reader_is_told_to_wait_and_scrapes_are_not(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> subprocess.CompletedProcess[str]:
        reading.set()
        assert go_on.wait(HANGS)
        return subprocess.CompletedProcess([], 0, "the account", "")

    monkeypatch.setattr(processes, "finished", slow)
    first = threading.Thread(target=ask, args=(client, "cmpl-ended-0"))
    first.start()
    assert reading.wait(HANGS)
    second, scrape = ask(client, "cmpl-open-0"), client.get("/metrics")
    go_on.set()
    first.join(HANGS)

    assert (429, 200) == (second.status, scrape.status)
    assert "Another account is being read; ask again." in second.text
    assert "the account" == account(ask(client, "cmpl-open-0"))


def test_too_much_to_read_is_a_sentence(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is too large, one of its journals is not."""
    monkeypatch.setattr(processes, "SHOW_BYTES", size_bytes(client.follower.path / "engine-3"))
    refused, read = ask(client, TWICE), ask(client, TWICE, "engine-3")

    assert (503, 200) == (refused.status, read.status)
    command = f"kvledger show '{client.follower.path}' REQUEST prints it."
    assert f" that are read for a page. {command}" in html.unescape(refused.text)


@pytest.mark.parametrize("limit", ["time", "memory", "characters", "a client that left"])
def test_a_reader_that_needs_too_much_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    journals.clean(tmp_path / "engine")
    code = {
        "time": "import time; time.sleep(600)",
        "a client that left": "import time; time.sleep(600)",
        "memory": processes.LIMITED.partition("import os")[0] + "bytearray(1 << 30)",
        "characters": f"print('x' * {processes.SHOWN_CHARACTERS})",
    }[limit]
    monkeypatch.setattr(processes, "LIMITED", code)
    monkeypatch.setattr(processes, "LOOK_SECONDS", 0.01)
    if limit == "time":
        monkeypatch.setattr(processes, "SHOW_SECONDS", 0.1)

    shown = AccountReader().read(tmp_path, [], "a", lambda: limit == "a client that left")

    says = {
        "memory": "more than the memory that it may have",
        "characters": "The account is too long for a page.",
    }
    assert "" == shown.text
    assert says.get(limit, " s and was ended. kvledger show ") in shown.sentences[0]
    assert 503 == shown.status


def test_the_page_has_the_rules_of_the_others(tmp_path: Path) -> None:
    """A password where there is one, and no figures before everything was read."""
    journals.clean(tmp_path / "engine")
    word = "Basic " + base64.b64encode(b"me:word").decode()
    security = http_server.Security(authorizes=lambda header, *_: header == word)
    with served(tmp_path, security=security) as client:
        assert 401 == client.get("/request").status
        assert 200 == client.get("/request", Authorization=word).status
        assert 405 == client.get("/request", "POST", Authorization=word).status
    with served(tmp_path, ready=False) as client:
        assert 503 == ask(client, "a").status
