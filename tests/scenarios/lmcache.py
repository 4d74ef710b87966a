"""Real LMCache under the real scheduler: its vLLM adapter, scheduler side, with a store that is a table.

``python -m`` this module prints one JSON line a scenario, as ``matrix`` does. It runs in an environment of
scripts/releases.py that has LMCache: nothing compiled is there, so what is compiled in LMCache is stood
in for by names that are never called on the scheduler's side. Everything else is LMCache's own: the
adapter, its trackers, its plans. Two adapters: the package's, and the one that vLLM bundles, where the
installed LMCache still has what that one imports.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.scenarios.driving import Driver, start
from tests.scenarios.matrix import outcome
from tests.scenarios.registry import Scenario

CHUNK_TOKENS = 32
COMPILED = ("c_ops", "cuda_ops", "lmcache_fs", "lmcache_native", "lmcache_redis", "native_storage_ops")
ADAPTERS = {
    "package": "lmcache.integration.vllm.vllm_v1_adapter",
    "bundled": "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_integration.vllm_v1_adapter",
}
Attach = Callable[[Any], object]


class Table:
    """LMCache's look-up client, answering from a table: request id to tokens held; None: ask again."""

    def __init__(self) -> None:
        self.held: dict[str, list[int | None]] = {}
        """By request, one answer for each look-up; the last one stays."""
        self.requests: dict[str, Any] = {}
        """The scheduler's: the bundled adapter looks up under a name of its own."""

    def lookup(self, token_ids: Any, lookup_id: str, **_: Any) -> int | None:
        asked = list(token_ids)
        names = [n for n, r in self.requests.items() if asked[: r.num_prompt_tokens] == r.prompt_token_ids]
        answers = self.held.get(names[0], [0]) if names else [0]
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def lookup_cache(self, lookup_id: str) -> int:
        """-1: nothing is remembered."""
        return -1

    def supports_producer_reuse(self) -> bool:
        return False

    def clear_lookup_status(self, lookup_id: str) -> None:
        """There is none."""

    def close(self) -> None:
        """Nothing is open."""


class LMCacheScenario(Scenario):
    """A scenario that needs one of the adapters."""

    def lacking(self) -> list[str]:
        missing = _missing(self.setup.get("adapter", "package"))
        return [missing] if missing else super().lacking()


@functools.cache
def _missing(adapter: str) -> str:
    """Why an adapter can't be had here; "" if it can."""
    os.environ.update(LMCACHE_LOG_LEVEL="ERROR", LMCACHE_DISABLE_BANNER="1", LMCACHE_TRACK_USAGE="false")
    for name in COMPILED:
        sys.modules.setdefault(f"lmcache.{name}", mock.MagicMock())
    try:
        importlib.import_module(ADAPTERS[adapter])
    except ImportError as error:
        return f"the {adapter} adapter can't be imported: {error}"
    return ""


def begin(
    attach: Attach, adapter: str = "package", *, decode: bool = False, **setup: Any
) -> tuple[Driver, Table]:
    """A driver whose connector is LMCacheConnectorV1, and the store behind it.

    ``decode``: what is decoded is saved too.
    """
    factory = importlib.import_module("lmcache.v1.lookup_client").LookupClientFactory
    table = Table()
    options = (
        ("use_native", adapter == "bundled"),
        ("lmcache.chunk_size", CHUNK_TOKENS),
        ("lmcache.save_decode_cache", decode),
        ("lmcache.save_unfull_chunk", False),
    )
    with mock.patch.object(factory, "create_lookup_client", lambda *_, **__: table):
        driver = start(attach, connector="LMCacheConnectorV1", connector_options=options, **setup)
    table.requests = driver.scheduler.requests
    return driver, table


def _steps(driver: Driver, count: int) -> None:
    for _ in range(count):
        driver.step()


def found_at_first(attach: Attach = id, **setup: Any) -> Driver:
    """New requests of which the store holds nothing, a part, a part beyond the local hit, and all."""
    driver, table = begin(attach, **setup)
    table.held = {"part": [64], "more": [128], "whole": [96]}
    driver.add("none", 100, 3)
    driver.add("part", 100, 3)
    driver.run()
    driver.add("more", 150, 3, shares=("none", 64))
    driver.add("whole", 96, 3)
    driver.run()
    return driver


def asked_again(attach: Attach = id, **setup: Any) -> Driver:
    """The store has no answer yet, twice, then holds a part; another request ends while it waits."""
    driver, table = begin(attach, **setup)
    table.held = {"later": [None, None, 64], "never": [None]}
    driver.add("later", 100, 3)
    driver.add("never", 100, 3)
    _steps(driver, 2)
    driver.abort("never")
    driver.run()
    return driver


def in_chunks(attach: Attach = id, **setup: Any) -> Driver:
    """Prompts longer than a step, beside one that decodes; one is given up in its midst."""
    driver, table = begin(attach, max_batched_tokens=48, **setup)
    table.held = {"half": [64]}
    driver.add("decodes", 20, 12)
    driver.add("long", 200, 3)
    driver.add("half", 150, 3)
    driver.add("left", 180, 3)
    _steps(driver, 11)
    driver.abort("left")
    driver.run()
    return driver


def resumed(attach: Attach = id, **setup: Any) -> Driver:
    """LMCache#1969: preempted in decode, its local cache gone; the store holds 64 of its prompt."""
    driver, table = begin(attach, **setup)
    table.held = {"r": [0, 64]}
    driver.add("r", 70, 20)
    _steps(driver, 10)
    driver.drain()
    driver.preempt("r")
    driver.reset_prefix_cache()
    driver.run()
    return driver


def resumed_in_part(attach: Attach = id, **setup: Any) -> Driver:
    """The same, with two blocks still in the local cache: local first, then external."""
    driver, table = begin(attach, blocks=10, **setup)
    table.held = {"r": [0, 0, 64], "filler": [0]}
    driver.add("r", 70, 20)
    _steps(driver, 10)
    driver.drain()
    driver.preempt("r")
    table.held["r"] = [None, 64]
    driver.add("filler", 100, 1)
    driver.run()
    return driver


def resumed_without(attach: Attach = id, **setup: Any) -> Driver:
    """Preempted and resumed, cold and from the local cache; the store holds nothing."""
    driver, _ = begin(attach, **setup)
    driver.add("r", 70, 30)
    for _ in range(2):
        _steps(driver, 8)
        driver.drain()
        driver.preempt("r")
        _steps(driver, 4)
    driver.drain()
    driver.preempt("r")
    driver.reset_prefix_cache()
    driver.run()
    return driver


def decoded(attach: Attach = id, **setup: Any) -> Driver:
    """Output of more than a chunk is saved as it comes."""
    driver, _ = begin(attach, decode=True, **setup)
    driver.add("r", 33, 80)
    driver.add("other", 70, 50)
    driver.run()
    return driver


def prompt_only(attach: Attach = id, **setup: Any) -> Driver:
    """Only prompts are saved."""
    driver, _ = begin(attach, **setup)
    driver.add("r", 70, 60)
    driver.run()
    return driver


DRIVES = (
    found_at_first,
    asked_again,
    in_chunks,
    resumed,
    resumed_in_part,
    resumed_without,
    decoded,
    prompt_only,
)
SCENARIOS: dict[str, LMCacheScenario] = {
    scenario.name: scenario
    for drive in DRIVES
    for adapter in ADAPTERS
    for mode, asynchronous in (("sync", False), ("async", True))
    for scenario in [
        LMCacheScenario(
            f"lmcache_{drive.__name__}_{adapter}_{mode}",
            drive,
            {"adapter": adapter, "asynchronous": asynchronous},
            frozenset({"async"} if asynchronous else ()),
        )
    ]
}


def main(names: list[str]) -> None:
    """Run the named scenarios, or all."""
    said = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for name in names or SCENARIOS:
            print(json.dumps({"scenario": name, **outcome(SCENARIOS[name])}), file=said, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
