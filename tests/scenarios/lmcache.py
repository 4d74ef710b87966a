"""Scenarios of the real LMCache under the real scheduler, with a table in place of its store.

``python -m tests.scenarios.lmcache`` prints one JSON line per scenario, as ``matrix`` does. It runs in an
environment of scripts/releases.py that has LMCache without its compiled modules (``traffic/lmcache.py``). The
scheduler side is LMCache's own: the vLLM adapter, its trackers and its connector metadata. There are two
adapters: the package's, and the one that vLLM bundles.
The bundled adapter runs only where the installed LMCache still has the names that it imports.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

from tests.scenarios.driving import Driver, lora, start
from tests.scenarios.matrix import outcome
from tests.scenarios.registry import Scenario

from kvledger.audit.traffic import lmcache

CHUNK_TOKENS = 32
ADAPTERS = {
    "package": "lmcache.integration.vllm.vllm_v1_adapter",
    "bundled": "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_integration.vllm_v1_adapter",
    "server": "lmcache.integration.vllm.lmcache_mp_connector",
}
Attach = Callable[[Any], object]


class Table(lmcache.StoreTable):
    """LMCache's store as a table by request id: stored tokens, or None to defer."""

    answers: dict[str, list[int | None]]
    """By request id, one answer for each lookup; the last answer is repeated."""

    def answer(self, request: Any) -> int | None:
        answers = self.answers[request.request_id]
        return answers.pop(0) if len(answers) > 1 else answers[0]


class LMCacheScenario(Scenario):
    """A scenario that runs only where its adapter can be imported."""

    def lacking(self) -> list[str]:
        missing = missing_adapter(self.setup.get("adapter", "package"))
        return [missing] if missing else super().lacking()


@functools.cache
def missing_adapter(adapter: str) -> str:
    """The reason why an adapter can't be imported here; "" if it can."""
    try:
        importlib.import_module(lmcache.module(ADAPTERS[adapter]))
    except ImportError as error:
        return f"the {adapter} adapter can't be imported: {error}"
    return ""


def start_with_table(
    attach: Attach, adapter: str = "package", *, decode: bool = False, **setup: Any
) -> tuple[Driver, Table]:
    """A driver with LMCacheConnectorV1 as its connector, and the table that answers its lookups.

    ``decode``: the KV of decoded tokens is saved as well.
    """
    table = Table()
    how = {"connector": adapter, "chunk_tokens": CHUNK_TOKENS, "save_decoded": decode}
    with lmcache.answered_by(table, **how, **setup) as engine:
        driver = start(attach, **engine)
    table.requests = driver.scheduler.requests
    return driver, table


def _steps(driver: Driver, count: int) -> None:
    for _ in range(count):
        driver.step()


def found_at_first(attach: Attach = id, **setup: Any) -> Driver:
    """Lookups of new requests that hit nothing, a part, a part beyond the local hit, and the whole prompt."""
    driver, table = start_with_table(attach, **setup)
    table.answers = {"part": [64], "more": [128], "whole": [96]}
    driver.add("none", 100, 3)
    driver.add("part", 100, 3)
    driver.run()
    driver.add("more", 150, 3, shares=("none", 64))
    driver.add("whole", 96, 3)
    driver.run()
    return driver


def asked_again(attach: Attach = id, **setup: Any) -> Driver:
    """Two lookups are deferred, then a part hits; another request is aborted while its lookup is deferred."""
    driver, table = start_with_table(attach, **setup)
    table.answers = {"later": [None, None, 64], "never": [None]}
    driver.add("later", 100, 3)
    driver.add("never", 100, 3)
    _steps(driver, 2)
    driver.abort("never")
    driver.run()
    return driver


def in_chunks(attach: Attach = id, **setup: Any) -> Driver:
    """Prompts longer than a step run beside a decoding request; one of them is aborted midway."""
    driver, table = start_with_table(attach, max_batched_tokens=48, **setup)
    table.answers = {"half": [64]}
    driver.add("decodes", 20, 12)
    driver.add("long", 200, 3)
    driver.add("half", 150, 3)
    driver.add("left", 180, 3)
    _steps(driver, 11)
    driver.abort("left")
    driver.run()
    return driver


def resumed(attach: Attach = id, **setup: Any) -> Driver:
    """LMCache#1969: `r` is preempted in decode, its local KV is lost; the store holds 64 prompt tokens."""
    driver, table = start_with_table(attach, **setup)
    table.answers = {"r": [0, 64]}
    driver.add("r", 70, 20)
    _steps(driver, 10)
    driver.drain()
    driver.preempt("r")
    driver.reset_prefix_cache()
    driver.run()
    return driver


def resumed_in_part(attach: Attach = id, **setup: Any) -> Driver:
    """As `resumed`, with two blocks still in the local cache: local tokens first, then external ones."""
    driver, table = start_with_table(attach, blocks=10, **setup)
    table.answers = {"r": [0, 0, 64], "filler": [0]}
    driver.add("r", 70, 20)
    _steps(driver, 10)
    driver.drain()
    driver.preempt("r")
    table.answers["r"] = [None, 64]
    driver.add("filler", 100, 1)
    driver.run()
    return driver


def resumed_without(attach: Attach = id, **setup: Any) -> Driver:
    """`r` is preempted and resumed, with and without a local hit; the store holds nothing."""
    driver, _ = start_with_table(attach, **setup)
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
    """Decoded tokens are saved chunk by chunk while the requests run."""
    driver, _ = start_with_table(attach, decode=True, **setup)
    driver.add("r", 33, 80)
    driver.add("other", 70, 50)
    driver.run()
    return driver


def prompt_only(attach: Attach = id, **setup: Any) -> Driver:
    """Prompt tokens are saved, and decoded tokens are not."""
    driver, _ = start_with_table(attach, **setup)
    driver.add("r", 70, 60)
    driver.run()
    return driver


def _two(attach: Attach, first: dict[str, Any], second: dict[str, Any], **setup: Any) -> Driver:
    """The store has the 64 tokens that `first` saved; `second` has the same text, and no local hit."""
    driver, table = start_with_table(attach, **setup)
    table.answers = {"second": [64]}
    for name, of_request in (("first", first), ("second", second)):
        driver.add(name, 100, 3, shares=("family", 64), of_request=of_request)
        driver.run()
        driver.reset_prefix_cache()
    return driver


def shared_between_salts(attach: Attach = id, **setup: Any) -> Driver:
    """LMCache#2880: the store gives a request the KV that was saved with another cache salt."""
    return _two(attach, {"cache_salt": "alice"}, {"cache_salt": "bob"}, **setup)


def shared_between_adapters(attach: Attach = id, **setup: Any) -> Driver:
    """LMCache#2961: the store gives a request the KV that was saved with another LoRA adapter."""
    return _two(attach, lora("sql", 1), lora("law", 2), **setup)


def shared_by_one_client(attach: Attach = id, **setup: Any) -> Driver:
    """Both requests have the same cache salt and LoRA adapter."""
    return _two(
        attach, {"cache_salt": "alice", **lora("sql", 1)}, {"cache_salt": "alice", **lora("sql", 1)}, **setup
    )


class Server:
    """Stands in for LMCache's server behind LMCacheMPConnector: it has these tokens of each request."""

    lmcache_tokens_per_chunk = CHUNK_TOKENS
    stored: ClassVar[dict[str, int]] = {}

    def __init__(self, **_: Any) -> None:
        """The arguments say where the server is."""

    def check_lookup_result(self, request_id: str) -> int:
        """How many tokens of a request the server has."""
        return self.stored.get(request_id, 0)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def asked_again_for_room(attach: Attach = id, *, adapter: str, **setup: Any) -> Driver:
    """LMCache#4508: `r` finds 32 tokens at each lookup, and has no blocks for them until `other` ends."""
    name = lmcache.module(ADAPTERS[adapter])
    with mock.patch(f"{name}.LMCacheMPSchedulerAdapter", Server), mock.patch.dict(Server.stored, {"r": 32}):
        driver = start(attach, connector="LMCacheMPConnector", connector_module=name, blocks=16, **setup)
        driver.add("other", 230, 2)
        driver.add("r", 236, 2)
        while driver.scheduler.has_requests():
            requests = driver.schedule().kv_connector_metadata.requests
            driver.runner.loading.update(row.request_id for row in requests if row.direction == "RETRIEVE")
            ended = {name for name, request in driver.scheduler.requests.items() if request.is_finished()}
            driver.connector.held = ended
            driver.output(finished_recving="all", finished_sending="all")
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
    shared_between_salts,
    shared_between_adapters,
    shared_by_one_client,
)
SCENARIOS: dict[str, LMCacheScenario] = {
    scenario.name: scenario
    for drive in DRIVES
    for adapter in ("package", "bundled")
    for mode, asynchronous in (("sync", False), ("async", True))
    for scenario in [
        LMCacheScenario(
            f"lmcache_{drive.__name__}_{adapter}_{mode}",
            drive,
            {"adapter": adapter, "asynchronous": asynchronous},
        )
    ]
} | {
    "lmcache_asked_again_for_room": LMCacheScenario(
        "lmcache_asked_again_for_room", asked_again_for_room, {"adapter": "server"}
    )
}


def main(names: list[str]) -> None:
    """Run the named scenarios, or all."""
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for name in names or SCENARIOS:
            print(json.dumps({"scenario": name, **outcome(SCENARIOS[name])}), file=stdout, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
