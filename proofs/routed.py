"""Runs two servers behind vllm-router in its kv_aware mode, records their KV events, restarts one of them.

    make proof NAME=routed ARGS="[--folder FOLDER] [--write]"

The routers, ``vllm-router`` and ``ai-dynamo-runtime`` (PyPI), have an environment in build/routers.
Two recorders listen to each engine: a whole one, and one that loses the batches 3 to 6 of each publisher.
Afterwards FOLDER/whole and FOLDER/lossy hold journals for ``kvledger check routing``, and FOLDER/*.jsonl what
both routers predicted: vllm-router of the engine that it chose, and Dynamo's KvRouter of each engine.
``--write`` puts the result into docs/routing.md.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.page import put_between
from prometheus_client.parser import text_string_to_metric_families
from tests.serving import processes
from tests.serving.processes import Engine, Server, Sidecar, free_port

KEY = "a key of the tests, no secret"
LOST = frozenset(range(3, 7))
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "routing.md"
ENVIRONMENT = ROOT / "build" / "routers"
ROUTERS = ("vllm-router==0.1.17", "ai-dynamo-runtime==1.6.1")
BEGIN, END = "<!-- make proof NAME=routed ARGS=--write -->", "<!-- end -->"

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
        return [*words, "--enable-scale-out"]  # the router lets an engine tokenize the prompts

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
            *("--health-check-interval-secs", "30", "--health-failure-threshold", "1"),
            *("--health-success-threshold", "1", "--cb-timeout-duration-secs", "4"),
            *("--router-temperature", "1"),  # both engines get requests
            *("--log-level", "debug", "--prometheus-port", str(free_port())),
        ]

    def log_size(self) -> int:
        """Bytes of the log by now."""
        return self._log.stat().st_size

    def decisions(self, before: int) -> list[tuple[str, int]]:
        """The worker and the credited tokens of each decision that was logged after so many bytes."""
        with self._log.open("rb") as log:
            log.seek(before)
            said = re.sub(r"\x1b\[[0-9;]*m", "", log.read().decode(errors="replace"))
        return [
            (found[1], int(found[2]))
            for found in re.finditer(
                r'KV prefix decision .*worker="([^"]+)".*credited_prefix_tokens=(\d+)', said
            )
        ]

    def complete(self, prompt: str, name: str, salt: str = "", port: int = 0) -> int:
        """Request a completion, of an engine at ``port`` if given. The status; 0: no answer."""
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=120)
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
    """A tokenizer whose words are w3 to w511: a text has as many tokens as words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<s>", "</s>", "<unk>"]
    names = [*special, *(f"w{n}" for n in range(3, 512))]
    words = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(model / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))


class Published(Protocol):
    """An engine that publishes KV events at a port, with its model in a folder of its own."""

    folder: Path
    events: int


class Dynamo:
    """Dynamo's KvRouter over the KV events of the engines, in processes of its environment."""

    def __init__(
        self, folder: Path, environment: Path, engines: Sequence[Published], block_tokens: int
    ) -> None:
        self._program = [
            str(environment / "bin" / "python"),
            str(Path(__file__).with_name("dynamo_router.py")),
        ]
        self._folder, self._engines, self._block_tokens = folder, engines, block_tokens
        self._workers: list[subprocess.Popen[str]] = []
        self._router: subprocess.Popen[str] | None = None
        self._ports: dict[str, int] = {}

    def start(self) -> None:
        """Start a worker for each engine, then the router."""
        store, block_tokens = str(self._folder / "discovery"), str(self._block_tokens)
        for engine in self._engines:
            events = f"tcp://127.0.0.1:{engine.events}"
            worker = self._run("worker", store, str(engine.folder / "model"), block_tokens, events)
            self._workers.append(worker)
            self._ports[_last_line(worker)] = engine.events
        self._router = self._run("router", store, block_tokens)
        while _last_line(self._router) != "ready":
            pass

    def _run(self, *words: str) -> subprocess.Popen[str]:
        log = (self._folder / "dynamo.log").open("a")
        pipe = subprocess.PIPE
        return subprocess.Popen([*self._program, *words], stdin=pipe, stdout=pipe, stderr=log, text=True)

    def predict(self, prompt: str) -> dict[int, int]:
        """The tokens of a prompt that each engine holds, by the port of its KV events."""
        return self.held({"token_ids": [int(word[1:]) for word in prompt.split()]})

    def held(self, asked: Mapping[str, Any]) -> dict[int, int]:
        """The same for the arguments of ``get_overlap_scores``. Raises RuntimeError if the router refuses."""
        assert self._router is not None and self._router.stdin is not None
        self._router.stdin.write(json.dumps(asked) + "\n")
        self._router.stdin.flush()
        answer = json.loads(_last_line(self._router))
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return {self._ports[worker]: self._block_tokens * count for worker, count in answer.items()}

    def kill(self) -> None:
        """End all processes."""
        for process in [*self._workers, *([self._router] if self._router else [])]:
            process.kill()
            process.wait()


def _last_line(process: subprocess.Popen[str]) -> str:
    """The next line of the output that is no log line."""
    assert process.stdout is not None
    while line := process.stdout.readline():
        if not line.startswith(("\x1b", "2")) or line.strip().isdecimal():
            return line.strip()
    raise AssertionError("the process has ended")


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


def families() -> list[list[int]]:
    """The beginnings that prompts share, of four blocks each."""
    return [[source.randrange(3, 500) for _ in range(128)] for source in map(random.Random, range(6))]


def prompts(count: int, seed: int) -> list[str]:
    """Prompts of six families, which share prefixes of one to four blocks."""
    choose = random.Random(seed)
    return [
        text(
            choose.choice(families())[: choose.choice((32, 64, 96, 128))]
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


class Client:
    """Sends one request after the other, and notes what both routers predicted of each."""

    def __init__(self, folder: Path, router: Router, dynamo: Dynamo, engines: list[RoutedEngine]) -> None:
        self._folder, self._router, self._dynamo = folder, router, dynamo
        self._ports = {engine.address: engine.events for engine in engines}
        self.retried = 0
        """Requests that the router sent to another engine after one did not answer."""

    def wave(self, some: list[str], name: str, salt: str = "") -> list[int]:
        """Send prompts; returns the statuses."""
        return [self._one(prompt, f"{name}-{number}", salt) for number, prompt in enumerate(some)]

    def direct(self, some: list[str], name: str, engine: RoutedEngine) -> list[int]:
        """Send prompts to one engine, and not through the router; returns the statuses."""
        names = [f"{name}-{number}" for number in range(len(some))]
        return [
            self._router.complete(prompt, name, port=engine.port)
            for prompt, name in zip(some, names, strict=True)
        ]

    def _one(self, prompt: str, name: str, salt: str) -> int:
        self._note("dynamo", name, self._dynamo.predict(prompt))
        before = self._router.log_size()
        status = self._router.complete(prompt, name, salt)
        decisions = self._router.decisions(before)
        if decisions:
            worker, tokens = decisions[-1]
            self._note("vllm-router", name, {self._ports[worker]: tokens})
        self.retried += len(decisions) > 1
        return status

    def _note(self, router: str, name: str, predicted: dict[int, int]) -> None:
        with (self._folder / f"{router}.jsonl").open("a") as file:
            file.write(json.dumps({"request": name, "predicted": predicted}) + "\n")


def run(folder: Path, environment: Path) -> dict[str, Any]:
    """Waves of requests; one has a salt, one is sent while an engine is gone, one after its restart."""
    os.environ["KVLEDGER_EVENTS_KEY"] = KEY
    whole = folder / "whole"
    engines = [RoutedEngine(folder / f"engine-{n}", whole, f"engine{n}") for n in (1, 2)]
    router, stop = Router(folder, environment / "bin" / "vllm-router", engines), threading.Event()
    dynamo, sidecar = Dynamo(folder, environment, engines, BLOCK_TOKENS), Sidecar(folder, whole)
    client = Client(folder, router, dynamo, engines)
    threads: list[threading.Thread] = []
    found: dict[str, Any] = {}
    try:
        whole.mkdir()
        sidecar.start()
        start(engines)
        threads = recorders(folder, engines, stop)
        router.start()
        dynamo.start()
        time.sleep(5)
        found["first"] = client.wave(prompts(20, 1), "first")
        found["second"] = client.wave(prompts(14, 2), "second")
        found["salted"] = client.wave(prompts(6, 2), "salted", salt="another tenant")
        found["direct"] = client.direct([text(each) for each in families()], "direct", engines[0])
        time.sleep(2)
        engines[0].stop()
        found["gone"] = client.wave(prompts(6, 3), "gone")
        engines[0].start()
        time.sleep(35)  # until the router has checked its health
        found["restarted"] = client.wave(prompts(20, 4), "restarted")
        found["retried"] = client.retried
        time.sleep(2)
    finally:
        stop.set()
        dynamo.kill()
        with contextlib.suppress(OSError):
            router.kill()
        for engine in engines:
            with contextlib.suppress(OSError):
                if engine._process is not None:
                    engine.stop() if "restarted" in found else engine.kill()
        for thread in threads:
            thread.join()
        if "restarted" in found:
            time.sleep(5)
            found["sidecar"] = counted(sidecar.get("/metrics"))
        sidecar.kill()
    for journal in whole.glob("engine-*"):
        shutil.copytree(journal, folder / "lossy" / journal.name)
    return found


def counted(metrics: str) -> dict[str, int]:
    """What the sidecar counted of routing, by metric and cause, over both engines; without zeros."""
    sums: dict[str, int] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if family.name.startswith(("kvledger_rout", "kvledger_kv_event")) and sample.value:
                name = f"{family.name} {sample.labels.get('cause', '')}".strip()
                sums[name] = sums.get(name, 0) + int(sample.value)
    return sums


def start(engines: list[RoutedEngine]) -> None:
    """Start engines at the same time."""
    starting = [threading.Thread(target=each.start) for each in engines]
    for each in starting:
        each.start()
    for each in starting:
        each.join()
    assert all(each._process is not None for each in engines)


def shown(folder: Path, *words: str) -> str:
    """What ``kvledger check routing`` prints of the journals in a folder."""
    command = [sys.executable, "-m", "kvledger", "check", "routing", str(folder), *words]
    environment = os.environ | {"COLUMNS": "140", "NO_COLOR": "1"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def routers() -> Path:
    """The environment of the routers, built or completed first."""
    if not (ENVIRONMENT / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    install = [str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "install", "--quiet", *ROUTERS]
    subprocess.run(install, check=True)
    return ENVIRONMENT


def main() -> None:
    """Run, print the tables, and write them if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    processes.START_SECONDS = 600.0
    found = run(folder, routers())
    (folder / "result.json").write_text(json.dumps(found))
    print(json.dumps(found))
    check(folder, found["sidecar"])
    shown_by = results(folder)
    for title, table in shown_by.items():
        print(f"--- {title}", table, sep="\n")
    if asked.write:
        write(found, shown_by)


def check(folder: Path, sidecar: dict[str, int]) -> None:
    """The sidecar counted what the command finds in the journals, and each token has a known cause."""
    whole = json.loads(shown(folder / "whole", "--format", "json"))
    expected = {f"kvledger_routing_{name}_tokens": whole[name] for name in ("predicted", "found")}
    expected["kvledger_routed_requests"] = whole["requests"]
    for row in whole["causes"]:
        expected[f"kvledger_routing_{row['side']}_tokens {row['cause']}"] = row["tokens"]
    routed = {name: value for name, value in sidecar.items() if name.startswith("kvledger_rout")}
    assert expected == routed, (expected, routed)
    for name in ("whole", "lossy"):
        causes = json.loads(shown(folder / name, "--format", "json"))["causes"]
        assert "unknown" not in {row["cause"] for row in causes}


def write(found: dict[str, Any], shown_by: dict[str, str]) -> None:
    """Put the tables of a run into the page."""
    statuses = [status for answered in found.values() if isinstance(answered, list) for status in answered]
    answered = f"{statuses.count(200)} of {len(statuses)} requests were answered"
    lines = [
        f"{answered}; the router sent {found['retried']} of them to the other engine after the first one did",
        "not answer. The KV events, replayed through our own index:",
        "",
        *_indented(shown_by["whole"]),
        "`kvledger serve` followed both engines meanwhile: its metrics have the same figures to the token.",
        "",
        "Replayed without the lost batches:",
        "",
        *_indented(shown_by["lossy"]),
        "Through an index without salts (`--index tokens`); six requests repeat prompts under another salt:",
        "",
        *_indented(shown_by["tokens"]),
        "What `vllm-router` itself credited to the engine that it chose (`--predictions`):",
        "",
        *_indented(shown_by["vllm-router"]),
        "What Dynamo's `KvRouter`, which followed the same publishers, held of each prompt when it was sent:",
        "",
        *_indented(shown_by["dynamo"]),
    ]
    put_between(BEGIN, END, ["", *lines], PAGE)


def _indented(table: str) -> list[str]:
    """The sums and the causes of a table, without the requests."""
    head, _, _ = table.partition("\nrequest ")
    return [*(f"    {line.rstrip()}".rstrip() for line in head.rstrip().splitlines()), ""]


def results(folder: Path) -> dict[str, str]:
    """The tables of a run, by what they show."""
    return {
        "whole": shown(folder / "whole"),
        "lossy": shown(folder / "lossy"),
        "tokens": shown(folder / "whole", "--index", "tokens"),
        "vllm-router": shown(folder / "whole", "--predictions", str(folder / "vllm-router.jsonl")),
        "dynamo": shown(folder / "whole", "--predictions", str(folder / "dynamo.jsonl")),
    }


if __name__ == "__main__":
    main()
