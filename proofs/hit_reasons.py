"""Asks `kvledger check --probe` why few prompt tokens hit on real servers, each with one reason.

Usage: make proof NAME=hit_reasons ARGS="[SERVER...]"

It may say nothing of three servers that are fine.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.serving.processes import ROOT, Engine
from tests.time_limits import RUN_HANGS

DETAILS = "--enable-prompt-tokens-details"
UNCOUNTED = """
from vllm.v1.metrics.stats import PrefixCacheStats
PrefixCacheStats.record = lambda *_, **__: None
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as Uncounted
"""
"""A scheduler class of a plugin whose engine counts no lookup."""

LIMITED = """
from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as Uncounted

ends = set()
find = UnitaryKVCacheCoordinator.find_longest_cache_hit

def limited(self, hashes, most):
    size = self.block_size
    found, known = find(self, hashes, most), set(ends)
    ends.add(hashes[most // size - 1] if most >= size else None)
    return find(self, hashes, {limit})

UnitaryKVCacheCoordinator.find_longest_cache_hit = limited
"""
"""The same of one whose engine hits ``limit`` tokens at most, as engines with a drafter or with states do.

``found[1]`` are the tokens that hit, and ``known`` the last blocks of the prompts before.
"""

DROPPED = LIMITED.replace("{limit}", "max(0, found[1] - 1)")
AT_ENDS = LIMITED.replace(
    "{limit}", "max([n * size for n in range(1, found[1] // size + 1) if hashes[n - 1] in known], default=0)"
)
LARGER = LIMITED.replace("{limit}", "found[1] // (3 * size) * (3 * size)")

NEXT_HASHED = """
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as Uncounted

keys = kv_cache_utils.generate_block_hash_extra_keys

def with_next(request, start, end, place):
    found, place = keys(request, start, end, place)
    return (*(found or ()), *request.all_token_ids[end : end + 1]), place

kv_cache_utils.generate_block_hash_extra_keys = with_next
"""
"""The same of one whose block hashes cover the next token, too, as those of a drafter that reads it."""


class Served(Engine):
    """A server without kvledger, with its own options instead of a connector."""

    def __init__(self, folder: Path, options: dict[str, Any], flags: list[str]) -> None:
        super().__init__(folder, folder)
        self._options, self._flags = options, flags

    def command(self) -> list[str]:
        command = super().command()
        place = command.index("--kv-transfer-config")
        del command[place : place + 2]
        for name, value in ({"num-gpu-blocks-override": 400} | self._options).items():
            option = f"--{name}"
            if option in command:
                command[command.index(option) + 1] = str(value)
            else:
                command += [option, str(value)]
        return [*command, *self._flags]

    def environment(self) -> dict[str, str]:
        ours = {"KVLEDGER_DIR", "KVLEDGER_GROUP"}
        inherited = {name: value for name, value in super().environment().items() if name not in ours}
        return inherited | {"PYTHONPATH": os.pathsep.join(map(str, (self.folder, ROOT / "src", ROOT)))}

    def ask(self, prompt: list[int], **more: Any) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "ignore_eos": True, "detokenize": False}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(asked | more), headers)
        with connection.getresponse() as response:
            assert 200 == response.status, response.read()


def prompt(seed: int, tokens: int) -> list[int]:
    return [(seed * 37 + place * (seed + 1)) % 400 + 3 for place in range(tokens)]


def equal(engine: Served) -> None:
    for _ in range(8):
        engine.ask(prompt(1, 170))


def different(engine: Served) -> None:
    for seed in range(8):
        engine.ask(prompt(seed, 170))


def short(engine: Served) -> None:
    for _ in range(8):
        engine.ask(prompt(1, 20))


def in_turn(engine: Served) -> None:
    for number in range(30):
        engine.ask(prompt(number % 6, 170))


def salted(engine: Served) -> None:
    for number in range(8):
        engine.ask(prompt(1, 170), cache_salt=f"salt {number}")


class Planted(NamedTuple):
    reason: str
    load: Callable[[Served], None]
    options: dict[str, Any] = {}
    flags: tuple[str, ...] = (DETAILS,)
    scheduler: str = ""


PLANTED = {
    "nothing": Planted("", equal),
    "nothing, without details": Planted("", equal, {}, ()),
    "ngram drafts": Planted(
        "", equal, {"speculative-config": json.dumps({"method": "ngram", "num_speculative_tokens": 2})}
    ),
    "caching off": Planted("caching-off", equal, {}, (DETAILS, "--no-enable-prefix-caching")),
    "short prompts": Planted("short-prompts", short),
    "short sequences": Planted("short-prompts", short, {"block-size": 128, "max-model-len": 100}),
    "a small cache": Planted("cache-too-small", in_turn, {"num-gpu-blocks-override": 12}),
    "different prompts": Planted("nothing-shared", different),
    "different prompts, without details": Planted("nothing-shared", different, {}, ()),
    "salts": Planted("nothing-shared", salted),
    "two engines": Planted("spread", different, {"data-parallel-size": 2}),
    "a drafter's last block": Planted("last-unit-dropped", different, {}, (DETAILS,), DROPPED),
    "states where prompts ended": Planted("few-states", different, {}, (DETAILS,), AT_ENDS),
    "hashes of the next token": Planted("next-token-hashed", different, {}, (DETAILS,), NEXT_HASHED),
    "hits of three blocks": Planted("larger-unit", different, {}, (DETAILS,), LARGER),
    "a plugin": Planted("not-counted", equal, {}, (DETAILS,), UNCOUNTED),
}


def asked(name: str, folder: Path) -> dict[str, Any]:
    """What ``kvledger check --probe`` says of a server with this reason."""
    planted = PLANTED[name]
    options = dict(planted.options)
    if planted.scheduler:
        (folder / "plugin_scheduler.py").write_text(planted.scheduler)
        options["scheduler-cls"] = "plugin_scheduler.Uncounted"
    engine = Served(folder, options, list(planted.flags))
    try:
        engine.start()
        planted.load(engine)
        command = [sys.executable, "-m", "kvledger", "check", engine.address, "--probe", "--format", "json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_HANGS)
    finally:
        engine.kill()
    assert not done.stderr, done.stderr
    return dict(json.loads(done.stdout))


def named(found: dict[str, Any]) -> list[dict[str, str]]:
    """The reasons of the server's first engine."""
    return list(found["engines"][0]["reasons"])


def main() -> int:
    """Print a row for each server, and exit with 1 if another reason came first."""
    names = sys.argv[1:] or list(PLANTED)
    wrong = 0
    print("| the server | `check --probe` says first | verdict |\n|---|---|---|")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            found = asked(name, Path(folder))
        reasons = named(found)
        first = reasons[0]["id"] if reasons else ""
        wrong += first != PLANTED[name].reason
        says = f"`{first}`: {reasons[0]['says']}" if reasons else "nothing"
        print(f"| {name} | {says} | {found['verdict']} |", flush=True)
    print(f"{len(names) - wrong} of {len(names)} as planted")
    return wrong > 0


if __name__ == "__main__":
    raise SystemExit(main())
