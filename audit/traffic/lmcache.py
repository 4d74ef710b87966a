"""LMCache's own adapter as the connector of a driven scheduler, with a table in place of LMCache's store.

Only the scheduler side of LMCache runs. That side never calls LMCache's compiled modules, so they need not
be installed: mocks replace those that are missing.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

CHUNK_TOKENS = 256
"""LMCache's default chunk."""
COMPILED = (
    "c_ops",
    "cuda_ops",
    "device_ops",
    "lmcache_fs",
    "lmcache_native",
    "lmcache_redis",
    "native_storage_ops",
)
"""Modules of LMCache that may be missing."""

_IN_PROCESS = "lmcache.inprocess"
"""Where LMCache has its in-process modules since 0.5.7; vLLM's LMCacheConnectorV1 does not look there."""
_CONNECTOR_MODULE = "lmcache.integration.vllm.lmcache_connector_v1"
"""The module of LMCache's own connector, which finds the adapter in every release."""


class StoreTable:
    """LMCache's lookup client: how many of a prompt's tokens the store has."""

    def __init__(self) -> None:
        self.answers: Mapping[str, Any] = {}
        """What the store has of each request's prompt; it has nothing of the others."""
        self.requests: Mapping[str, Any] = {}
        """The scheduler's requests. An adapter may look up under ids of its own, so a prompt is found by its
        tokens."""

    def answer(self, request: Any) -> int | None:
        """The tokens that the store has of a prompt in :attr:`answers`; None to be asked again later."""
        raise NotImplementedError

    def lookup(self, token_ids: Any, lookup_id: str, **_: Any) -> int | None:
        looked_up = list(token_ids)
        for name, request in self.requests.items():
            if name in self.answers and looked_up[: request.num_prompt_tokens] == request.prompt_token_ids:
                return self.answer(request)
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


def module(name: str) -> str:
    """The present name of a module of LMCache, once what it needs can be imported."""
    os.environ.update(LMCACHE_LOG_LEVEL="ERROR", LMCACHE_DISABLE_BANNER="1", LMCACHE_TRACK_USAGE="false")
    for compiled in (f"lmcache.{name}" for name in COMPILED):
        if compiled not in sys.modules and importlib.util.find_spec(compiled) is None:
            sys.modules[compiled] = mock.MagicMock()
    moved = _IN_PROCESS + name.removeprefix("lmcache")
    is_moved = name.startswith("lmcache.") and importlib.util.find_spec(_IN_PROCESS) is not None
    return moved if is_moved and importlib.util.find_spec(moved) is not None else name


@contextmanager
def answered_by(
    table: StoreTable,
    *,
    connector: str = "lmcache",
    chunk_tokens: int = CHUNK_TOKENS,
    save_decoded: bool = False,
    **engine: Any,
) -> Iterator[dict[str, Any]]:
    """The arguments of ``setup_of`` for an engine that is built within; its lookups are answered by a table.

    ``connector`` ends with ``bundled`` for the adapter that vLLM bundles. With ``save_decoded`` the KV of
    decoded tokens is saved as well.
    """
    clients = module("lmcache.v1.lookup_client")
    options = (
        ("use_native", connector.endswith("bundled")),
        ("lmcache.chunk_size", chunk_tokens),
        ("lmcache.save_decode_cache", save_decoded),
        ("lmcache.save_unfull_chunk", False),
    )
    engine |= {"connector": "LMCacheConnectorV1", "connector_options": options}
    if clients.startswith(_IN_PROCESS):
        engine |= {"connector": "LMCacheConnectorV1Dynamic", "connector_module": _CONNECTOR_MODULE}
    factory = importlib.import_module(clients).LookupClientFactory
    with mock.patch.object(factory, "create_lookup_client", lambda *_, **__: table):
        yield engine
