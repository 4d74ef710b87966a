"""An engine with LMCache's own adapter, and a table in place of LMCache's store.

Only the scheduler side of LMCache runs. That side never calls LMCache's compiled modules, so they need not
be installed: mocks replace those that are missing.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import Any
from unittest import mock

from ..traffic.driver import Driver
from ..traffic.engine_setup import EngineSetup, setup_of
from ..traffic.script import Answer, Request

CHUNK_TOKENS = 256
"""LMCache's default chunk."""

_COMPILED = ("c_ops", "cuda_ops", "lmcache_fs", "lmcache_native", "lmcache_redis", "native_storage_ops")
_IN_PROCESS = "lmcache.inprocess"
"""Where LMCache has its in-process modules since 0.5.7."""
_CONNECTOR_MODULE = "lmcache.integration.vllm.lmcache_connector_v1"


class StoreTable:
    """LMCache's lookup client: how many of a prompt's tokens the store has, by the request's answers.

    The n-th answer holds after n preemptions, and the last one stays.
    """

    def __init__(self, answers: Mapping[str, tuple[Answer, ...]]) -> None:
        self.requests: Mapping[str, Any] = {}
        """The scheduler's requests; an adapter may look them up under ids of its own."""
        self._answers = answers
        """By request: the tokens that the store has of its prompt, after each preemption."""

    def lookup(self, token_ids: Any, lookup_id: str, **_: Any) -> int | None:
        looked_up = list(token_ids)
        for name, request in self.requests.items():
            answers = self._answers.get(name, ())
            if answers and looked_up[: request.num_prompt_tokens] == request.prompt_token_ids:
                answer: Any = answers[min(request.num_preemptions, len(answers) - 1)]
                return None if answer is None else int(answer)
        return 0

    def lookup_cache(self, lookup_id: str) -> int:
        """-1: no lookup is cached."""
        return -1

    def supports_producer_reuse(self) -> bool:
        return False

    def clear_lookup_status(self, lookup_id: str) -> None:
        """Nothing to clear."""

    def close(self) -> None:
        """Nothing to close."""


def start(engine: Mapping[str, Any], requests: Mapping[str, Request]) -> Driver:
    """A driver whose connector is LMCache's.

    Of ``engine``: ``connector`` ends with ``bundled`` for the adapter that vLLM bundles, ``chunk_tokens`` is
    LMCache's chunk, and with ``save_decoded`` the KV of decoded tokens is saved as well.
    """
    os.environ.update(LMCACHE_LOG_LEVEL="ERROR", LMCACHE_DISABLE_BANNER="1", LMCACHE_TRACK_USAGE="false")
    for name in _COMPILED:
        module = f"lmcache.{name}"
        if module not in sys.modules and importlib.util.find_spec(module) is None:
            sys.modules[module] = mock.MagicMock()
    moved = importlib.util.find_spec(_IN_PROCESS) is not None
    clients = importlib.import_module(f"{_IN_PROCESS if moved else 'lmcache'}.v1.lookup_client")
    table = StoreTable({name: request.answers for name, request in requests.items()})
    with mock.patch.object(clients.LookupClientFactory, "create_lookup_client", lambda *_, **__: table):
        driver = Driver(_setup(dict(engine), moved))
    table.requests = driver.scheduler.requests
    return driver


def _setup(engine: dict[str, Any], moved: bool) -> EngineSetup:
    options = (
        ("use_native", str(engine.pop("connector")).endswith("bundled")),
        ("lmcache.chunk_size", engine.pop("chunk_tokens", CHUNK_TOKENS)),
        ("lmcache.save_decode_cache", engine.pop("save_decoded", False)),
        ("lmcache.save_unfull_chunk", False),
    )
    engine |= {"connector": "LMCacheConnectorV1", "connector_options": options}
    if moved:
        engine |= {"connector": "LMCacheConnectorV1Dynamic", "connector_module": _CONNECTOR_MODULE}
    return setup_of(engine)
