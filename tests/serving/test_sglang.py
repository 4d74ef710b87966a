"""What a server of SGLang told its clients and published, beside the ledger, on a CPU.

``KVLEDGER_CALLS`` says of how many calls: 250 unless it is set.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from queue import Empty, Queue
from typing import Any, NamedTuple

import pytest
from scripts.releases import build, environ
from tests.serving.processes import ROOT, Server, lasting_port, wait_until

from kvledger.audit.demo.sglang.run import ENVIRON, write_endless_model
from kvledger.audit.events import CLEARED, STORED, Census, Event, KVEventsReceived
from kvledger.audit.hash_key import VARIABLE
from kvledger.audit.journal.reader import Reader
from kvledger.audit.replay.journals import audit_paths

pytestmark = pytest.mark.releases

RELEASE = "sglang-0.5.23"
CALLS = int(os.environ.get("KVLEDGER_CALLS", "250"))
CLIENTS, TURNS = 12, 5
REST_SECONDS = 120.0
"""An engine at rest tells its slots every half minute."""
KEY = "a key that the publisher has too"
POOL = 320
"""Tokens; too few for the requests that run at once, so some are retracted."""


class SGLang(Server):
    """SGLang's server with a tiny model; its scheduler's process loads the plugin."""

    ready = "/health"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "engine")
        self.events, self.replays = (f"tcp://127.0.0.1:{lasting_port()}" for _ in range(2))
        self.journals = folder / "journals"
        self.journals.mkdir()
        write_endless_model(folder / "model")
        # What SGLang imports and does not call on a CPU, in each of its processes.
        (folder / "sitecustomize.py").write_text("import kvledger.audit.demo.sglang.stubs\n")

    def command(self) -> list[str]:
        options = {
            "model-path": self.folder / "model",
            "host": "127.0.0.1",
            "port": self.port,
            "device": "cpu",
            "attention-backend": "torch_native",
            "sampling-backend": "pytorch",
            "dtype": "float32",
            "max-total-tokens": POOL,
            "mem-fraction-static": 0.5,
            "max-running-requests": 8,
            "chunked-prefill-size": 64,
            "schedule-conservativeness": 0.05,
            "log-level": "warning",
            "kv-events-config": json.dumps(
                {
                    "publisher": "zmq",
                    "endpoint": self.events.replace("127.0.0.1", "*"),  # else it connects
                    "replay_endpoint": self.replays.replace("127.0.0.1", "*"),
                }
            ),
        }
        flags = "skip-tokenizer-init disable-cuda-graph skip-server-warmup enable-cache-report"
        asked = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        asked += [f"--{name}" for name in (*flags.split(), "enable-streaming-session")]
        return [sys.executable, "-m", "sglang.launch_server", *asked]

    def environment(self) -> dict[str, str]:
        given = environ(RELEASE) | ENVIRON
        path = os.pathsep.join((str(self.folder), given["PYTHONPATH"], str(ROOT / "src")))
        return given | {"PYTHONPATH": path, "KVLEDGER_DIR": str(self.journals), VARIABLE: KEY}

    def post(self, path: str, asked: dict[str, Any]) -> str:
        """The body of an answer."""
        data, kind = json.dumps(asked).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(self.address + path, data, kind)
        with urllib.request.urlopen(request, timeout=300) as response:
            return str(response.read().decode())

    def generate(self, request_id: str, prompt: list[int], outputs: int, **more: Any) -> dict[str, Any]:
        """The last message of an answer; of a stream it has the usage, too."""
        parameters = {"max_new_tokens": outputs, "temperature": 0}
        asked = {"rid": request_id, "input_ids": prompt, "sampling_params": parameters, **more}
        body = self.post("/generate", asked)
        lines = [line.removeprefix("data: ") for line in body.splitlines() if line.strip()]
        answer: dict[str, Any] = json.loads([line for line in lines if line != "[DONE]"][-1])
        return answer


class Served(NamedTuple):
    """What the clients were told, by request id, and the folder."""

    folder: Path
    told: dict[str, dict[str, Any]]
    aborted: frozenset[str]


def words(numbers: random.Random, tokens: int) -> list[int]:
    return [numbers.randrange(2, 500) for _ in range(tokens)]


def calls(server: SGLang, told: dict[str, dict[str, Any]], aborted: set[str]) -> Iterator[Any]:
    """Each is a function that sends one request, or the turns of a session, and notes the answer."""
    prefixes = [words(random.Random(f"prefix {each}"), 90) for each in range(6)]

    def one(place: int) -> None:
        numbers, name = random.Random(place), f"c{place:04}"
        prompt = numbers.choice(prefixes)[: numbers.randrange(10, 91)] + words(
            numbers, numbers.randrange(1, 30)
        )
        aborts = place % 20 == 7
        if aborts:
            aborted.add(name)
            later = threading.Timer(
                numbers.uniform(0.02, 0.4), server.post, ("/abort_request", {"rid": name})
            )
            later.start()
        outputs = 60 if aborts else numbers.choice((1, 2, 5, 24, 60))
        try:
            told[name] = server.generate(name, prompt, outputs, stream=place % 10 == 3)
        except urllib.error.HTTPError as error:  # a request that was aborted in the queue
            assert name in aborted, error.read()

    def session(place: int) -> None:
        numbers = random.Random(place)
        asked = {"capacity_of_str_len": 100_000, "streaming": True, "timeout": None}
        session_id = json.loads(server.post("/open_session", asked))
        for turn in range(TURNS):
            name, prompt = f"s{place:04}t{turn}", words(numbers, numbers.randrange(4, 30))
            told[name] = server.generate(name, prompt, 4, session_params={"id": session_id})
        server.post("/close_session", {"session_id": session_id})

    for place in range(0, CALLS, TURNS):
        if place % 100 == 50:
            yield lambda place=place: session(place)
        else:
            yield from (lambda each=each: one(each) for each in range(place, place + TURNS))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The journals, the usage and the KV events of a server after a mixed load."""
    build([RELEASE])
    folder = tmp_path_factory.mktemp("sglang")
    server, told, aborted = SGLang(folder), dict[str, dict[str, Any]](), set[str]()
    failed: list[BaseException] = []
    recorder = None
    try:
        server.start()
        record = [sys.executable, "-m", "kvledger", "journals", "record-events", str(server.journals)]
        recorder = subprocess.Popen(
            [*record, "--endpoint", server.events, "--replay", server.replays],
            env={**os.environ, VARIABLE: KEY},
        )
        time.sleep(5)
        queue: Queue[Any] = Queue()
        for call in calls(server, told, aborted):
            queue.put(call)

        def client() -> None:
            try:
                while not failed:
                    queue.get_nowait()()
            except Empty:
                pass
            except BaseException as error:
                failed.append(error)

        clients = [threading.Thread(target=client) for _ in range(CLIENTS)]
        for each in clients:
            each.start()
        for each in clients:
            each.join()
        assert not failed, (failed, server.last_words())
        (folder / "usage.jsonl").write_text("".join(json.dumps(each) + "\n" for each in told.values()))
        wait_until(lambda: cached_at_rest(server.journals) is not None, REST_SECONDS, server.last_words)
        yield Served(folder, told, frozenset(aborted))
    finally:
        if recorder is not None:
            recorder.terminate()
            recorder.wait(60)
        server.kill()


def events_of(journals: Path, prefix: str) -> Iterator[Event]:
    """The events of the one journal whose name begins so."""
    (path,) = journals.glob(f"{prefix}-*")
    for batch in Reader(path).poll():
        yield from batch.events


def cached_at_rest(journals: Path) -> int | None:
    """The cached slots by the last census, if no request had a slot by then."""
    *_, last = (each for each in events_of(journals, "engine") if isinstance(each, Census))
    rests = last.step > 1 and not (last.uncached_slots or last.protected_slots or last.rows)
    return last.evictable_slots if rests else None


def usage(served: Served) -> dict[str, Any]:
    """What ``kvledger check usage`` finds."""
    command = [sys.executable, "-m", "kvledger", "check", "usage", str(served.folder / "journals")]
    command += ["--log", str(served.folder / "usage.jsonl"), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_call_was_told_what_the_ledger_has(served: Served) -> None:
    """Only calls that were aborted before they ran are told no figure."""
    found = usage(served)
    not_told = {row["call"] for row in found["rows"] if row["causes"] == "not-told"}

    assert found["calls"]["equal"] == CALLS == len(served.told)
    assert not_told <= served.aborted
    assert found["causes"] in ({}, {"not-told": len(not_told)})
    assert all(each["call"].startswith("HEALTH_CHECK") for each in found["unlogged"])


def test_tiers_and_retractions_that_were_told_are_those_of_the_ledger(served: Served) -> None:
    cached = {row["call"]: row["cached"] for row in usage(served)["rows"]}
    told = {name: each["meta_info"] for name, each in served.told.items()}
    retractions = sum(each.get("num_retractions", 0) for each in told.values())
    (audit,) = audit_paths([served.folder / "journals"]).engines

    assert {name: (cached[name], 0) for name in told if cached[name]} == {
        name: (details["device"], details["host"])
        for name, each in told.items()
        if (details := each.get("cached_tokens_details"))
    }
    assert audit.totals().of("preemptions") == retractions > 0
    assert not [each for each in audit.violations if each.severity == "violation"]


def test_what_was_published_as_stored_and_not_removed_is_what_the_census_says_is_cached(
    served: Served,
) -> None:
    held: set[int] = set()
    sequences = []
    for event in events_of(served.folder / "journals", "events"):
        if not isinstance(event, KVEventsReceived):
            continue
        sequences.append(event.sequence)
        rows = iter(event.rows)
        while header := list(islice(rows, 6)):
            code, ids = header[0], set(islice(rows, header[5]))
            assert not ids & held if code == STORED else ids <= held
            held = held | ids if code == STORED else set() if code == CLEARED else held - ids

    assert sequences == list(range(len(sequences)))
    assert cached_at_rest(served.folder / "journals") == len(held)
