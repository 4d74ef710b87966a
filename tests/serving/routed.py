"""Two servers behind vllm-router in its kv_aware mode, their KV events recorded.

    python -m tests.serving.routed FOLDER ROUTER_PROGRAM

``ROUTER_PROGRAM`` is ``vllm-router`` (PyPI), installed in an environment of its own. Two recorders listen to
each engine: a whole one, and one that loses the batches 3 to 6 of each publisher. Afterwards FOLDER/whole and
FOLDER/lossy hold journals for ``kvledger routing``, and FOLDER/router.log what the router says.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

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

    def complete(self, prompt: list[int], name: str, output_tokens: int = 4) -> int:
        """Request a completion; returns the status."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": output_tokens, "temperature": 0,
                 "ignore_eos": True, "detokenize": False}  # fmt: skip
        headers = {"Content-Type": "application/json", "X-Request-Id": name}
        try:
            connection.request("POST", "/v1/completions", json.dumps(asked), headers)
            response = connection.getresponse()
            response.read()
            return response.status
        finally:
            connection.close()


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


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts of six families, which share prefixes of two to eight blocks."""
    families = [[random.Random(n).randrange(3, 500) for _ in range(128)] for n in range(6)]
    choose = random.Random(seed)
    return [
        choose.choice(families)[: choose.choice((32, 64, 96, 128))]
        + [choose.randrange(3, 500) for _ in range(choose.randrange(1, 40))]
        for _ in range(count)
    ]


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


def wave(router: Router, some: list[list[int]], name: str) -> list[int]:
    """Two clients that send one request after the other; returns the statuses."""
    statuses: list[int] = []

    def client(first: int) -> None:
        for number in range(first, len(some), 2):
            statuses.append(router.complete(some[number], f"{name}-{number}"))

    clients = [threading.Thread(target=client, args=(first,)) for first in (0, 1)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    return statuses


def run(folder: Path, program: Path) -> dict[str, Any]:
    """Two waves of requests."""
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
        time.sleep(2)
    finally:
        stop.set()
        with contextlib.suppress(OSError):
            router.kill()
        for engine in engines:
            with contextlib.suppress(OSError):
                if engine._process is not None:
                    engine.stop() if found else engine.kill()
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


def main() -> None:
    folder, program = Path(sys.argv[1]), Path(sys.argv[2])
    (folder / "result.json").write_text(json.dumps(run(folder, program)))
    for name in ("whole", "lossy"):
        command = [sys.executable, "-m", "kvledger", "routing", str(folder / name)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
