"""Two servers behind vllm-router in its kv_aware mode, their KV events recorded, and one of them restarted.

    python -m tests.serving.routed ROUTER_PROGRAM [--folder FOLDER] [--write]

``ROUTER_PROGRAM`` is ``vllm-router`` (PyPI), installed in an environment of its own. Two recorders listen to
each engine: a whole one, and one that loses the batches 3 to 6 of each publisher. Afterwards FOLDER/whole and
FOLDER/lossy hold journals for ``kvledger routing``, and FOLDER/router.log what the router says. ``--write``
puts the result into docs/routing.md.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.serving import processes
from tests.serving.processes import Engine, Server, free_port

KEY = "a key of the tests, no secret"
LOST = frozenset(range(3, 7))
BLOCK_TOKENS = 32
"""What attention on CPUs needs."""


class RoutedEngine(Engine):
    """A server without a connector that publishes its KV events."""

    def __init__(self, folder: Path, journals: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, journals)
        write_tokenizer(folder / "model")
        self._name = name
        self.events, self.replay = free_port(), free_port()

    def command(self) -> list[str]:
        words = super().command()
        place = words.index("--kv-transfer-config")
        config = {
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://*:{self.events}",
            "replay_endpoint": f"tcp://*:{self.replay}",
        }
        words[place : place + 2] = ["--kv-events-config", json.dumps(config)]
        words[words.index("--block-size") + 1] = str(BLOCK_TOKENS)
        words[words.index("--num-gpu-blocks-override") + 1] = "32"
        words.remove("--skip-tokenizer-init")
        return words

    def environment(self) -> dict[str, str]:
        more = {"KVLEDGER_LEVEL": "blocks", "KVLEDGER_EVENTS_KEY": KEY, "KVLEDGER_NAME": self._name}
        return super().environment() | more


class Router(Server):
    """vllm-router in front of the engines."""

    ready = "/health"

    def __init__(self, folder: Path, program: Path, engines: list[RoutedEngine]) -> None:
        super().__init__(folder, "router")
        self._program, self._engines = program, engines

    def command(self) -> list[str]:
        urls = [each.address for each in self._engines]
        sources = [f"{each.address}=tcp://127.0.0.1:{each.events}" for each in self._engines]
        replays = [f"{each.address}=tcp://127.0.0.1:{each.replay}" for each in self._engines]
        return [
            str(self._program),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--worker-urls", *urls, "--policy", "kv_aware"),
            *(word for source in sources for word in ("--kv-event-source", source)),
            *(word for replay in replays for word in ("--kv-event-replay-source", replay)),
            *("--kv-event-block-size", str(BLOCK_TOKENS), "--kv-event-model", "tiny"),
            *("--log-level", "debug", "--prometheus-port", str(free_port())),
        ]

    def complete(self, prompt: str, name: str, salt: str = "") -> int:
        """Request a completion; returns the status, 0 without an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        headers = {"Content-Type": "application/json", "X-Request-Id": name}
        try:
            body = json.dumps(asked | ({"cache_salt": salt} if salt else {}))
            connection.request("POST", "/v1/completions", body, headers)
            response = connection.getresponse()
            response.read()
            return response.status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()


def write_tokenizer(model: Path) -> None:
    """A tokenizer whose words are w0 to w511: a text has as many tokens as words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(512)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(model / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w0", "eos_token": "w1"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))


class Lossy:
    """A subscription that loses some batches."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def next(self) -> Any:
        message = self._source.next()
        return None if message is not None and message.sequence in LOST else message

    def replayed(self, first: int) -> list[Any]:
        return (
            [each for each in self._source.replayed(first) if each.sequence not in LOST] if not first else []
        )


def prompts(count: int, seed: int) -> list[str]:
    """Prompts of six families, which share prefixes of one to four blocks."""
    families = [[random.Random(n).randrange(3, 500) for _ in range(128)] for n in range(6)]
    choose = random.Random(seed)
    return [
        text(
            choose.choice(families)[: choose.choice((32, 64, 96, 128))]
            + [choose.randrange(3, 500) for _ in range(choose.randrange(1, 40))]
        )
        for _ in range(count)
    ]


def text(tokens: list[int]) -> str:
    """The prompt of these tokens."""
    return " ".join(f"w{token}" for token in tokens)


def recorders(folder: Path, engines: list[RoutedEngine], stop: threading.Event) -> list[threading.Thread]:
    """Two recorders for each engine."""
    from kvledger.exporters.kv_events import EventRecorder, Subscription, key

    threads = []
    for name in ("whole", "lossy"):
        for number, engine in enumerate(engines):
            address = f"tcp://127.0.0.1:{engine.events}"
            source: Any = Subscription(address, f"tcp://127.0.0.1:{engine.replay}")
            recorder = EventRecorder(
                folder / name, Lossy(source) if name == "lossy" else source, key(), address, number
            )
            threads.append(threading.Thread(target=recorder.run, args=(stop,)))
            threads[-1].start()
    return threads


def wave(router: Router, some: list[str], name: str, salt: str = "") -> list[int]:
    """Two clients that send one request after the other; returns the statuses."""
    statuses: list[int] = []

    def client(first: int) -> None:
        for number in range(first, len(some), 2):
            statuses.append(router.complete(some[number], f"{name}-{number}", salt))

    clients = [threading.Thread(target=client, args=(first,)) for first in (0, 1)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    return statuses


def run(folder: Path, program: Path) -> dict[str, Any]:
    """Waves of requests; one has a salt, one is sent while an engine is gone, one after its restart."""
    os.environ["KVLEDGER_EVENTS_KEY"] = KEY
    whole = folder / "whole"
    engines = [RoutedEngine(folder / f"engine-{n}", whole, f"engine{n}") for n in (1, 2)]
    router, stop = Router(folder, program, engines), threading.Event()
    threads: list[threading.Thread] = []
    found: dict[str, Any] = {}
    try:
        start(engines)
        threads = recorders(folder, engines, stop)
        router.start()
        time.sleep(2)
        found["first"] = wave(router, prompts(20, 1), "first")
        found["second"] = wave(router, prompts(14, 2), "second")
        found["salted"] = wave(router, prompts(6, 2), "salted", salt="another tenant")
        time.sleep(2)
        engines[0].stop()
        found["gone"] = wave(router, prompts(6, 3), "gone")
        engines[0].start()
        time.sleep(8)
        found["restarted"] = wave(router, prompts(14, 4), "restarted")
        time.sleep(2)
    finally:
        stop.set()
        with contextlib.suppress(OSError):
            router.kill()
        for engine in engines:
            with contextlib.suppress(OSError):
                if engine._process is not None:
                    engine.stop() if "restarted" in found else engine.kill()
        for thread in threads:
            thread.join()
    for journal in whole.glob("engine-*"):
        shutil.copytree(journal, folder / "lossy" / journal.name)
    return found


def start(engines: list[RoutedEngine]) -> None:
    """Start engines at the same time."""
    starting = [threading.Thread(target=each.start) for each in engines]
    for each in starting:
        each.start()
    for each in starting:
        each.join()
    assert all(each._process is not None for each in engines)


def shown(folder: Path, *words: str) -> str:
    """What ``kvledger routing`` prints of the journals in a folder."""
    command = [sys.executable, "-m", "kvledger", "routing", str(folder), *words]
    environment = os.environ | {"COLUMNS": "140", "NO_COLOR": "1"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def main() -> None:
    """Run, print the tables, and write them if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    processes.START_SECONDS = 600.0
    found = run(folder, asked.program)
    (folder / "result.json").write_text(json.dumps(found))
    print(json.dumps(found))
    for name, index in (("whole", "own"), ("lossy", "own"), ("whole", "tokens")):
        print(f"--- {name}, index {index}")
        print(shown(folder / name, "--index", index))


if __name__ == "__main__":
    main()
