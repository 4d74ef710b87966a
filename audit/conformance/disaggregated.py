"""Two engines of one connector: what a request takes from elsewhere, the other one has prefilled for it.

Some connectors know no store, only engines: one prefills a prompt and keeps its blocks, another reads
them and decodes. The driver stands where a router stands: a prompt that begins as an earlier request's
goes to the prefilling engine first, for one token, and with what that engine says of its blocks
(``kv_transfer_params``) to the decoding one. Both are in this process, with a worker and a cache each;
how the KV comes from one to the other is the connector's.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any
from unittest import mock

from .driver import EngineSetup
from .worker import DriverWithWorker

BLOCK_SIZE = 32
"""Transfers go by the blocks of an attention backend, and that of the CPU wants a multiple of 32."""
PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
"""Engines on one machine are each told a port of their own."""
STEPS = 400
"""After which a prompt that is not prefilled is given up waiting for."""
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def prefilling(setup: dict[str, Any], salt: str) -> DriverWithWorker:
    """An engine that prefills and keeps what it has filled until it was read."""
    with _ports():
        return DriverWithWorker(_of("kv_producer", setup), salt=salt)


def decoding(setup: dict[str, Any], salt: str, prefiller: DriverWithWorker) -> DecodingDriver:
    """An engine that reads what ``prefiller`` has filled."""
    with _ports():
        return DecodingDriver(_of("kv_consumer", setup), salt=salt, prefiller=prefiller)


def shut_down(driver: DriverWithWorker) -> None:
    """As at an engine's end: its connector lets go of ports and threads."""
    driver.worker.connector.shutdown()
    driver.connector.shutdown()


class DecodingDriver(DriverWithWorker):
    """The engine of the two that a row drives; the other one turns along."""

    def __init__(self, setup: EngineSetup, *, salt: str, prefiller: DriverWithWorker) -> None:
        super().__init__(setup, salt=salt)
        self.prefiller = prefiller

    def add(
        self,
        request_id: str,
        prompt_tokens: int | Sequence[int],
        max_tokens: int = 16,
        *,
        shares: tuple[str, int] | None = None,
        **how: Any,
    ) -> Any:
        """As for any driver; a prompt that shares has all of it prefilled by the other engine."""
        prompt = self.prompt(request_id, prompt_tokens, shares)
        if shares:
            how["transfer"] = self._prefilled(f"{request_id} #{self._added}", prompt)
        return super().add(request_id, prompt, max_tokens, **how)

    def _prefilled(self, request_id: str, prompt: list[int]) -> dict[str, Any] | None:
        """What the other engine says of the blocks that it keeps."""
        self.prefiller.add(request_id, prompt, 1, transfer=TO_PREFILL)
        for _ in range(STEPS):
            self.prefiller.step()
            for output in self.prefiller.delivered.get(request_id, ()):
                if output.finish_reason is not None:
                    said: dict[str, Any] | None = output.kv_transfer_params
                    return said
        raise RuntimeError(f"{request_id} was not prefilled in {STEPS} steps")

    def step(self, **of_output: Any) -> dict[int, Any]:
        outputs = super().step(**of_output)
        self.prefiller.step()
        return outputs

    def run(self, max_steps: int = 3_000) -> None:
        """Turn until neither engine has anything left to do."""
        super().run(max_steps)
        self.prefiller.run(max_steps)


def _of(role: str, setup: dict[str, Any]) -> EngineSetup:
    return EngineSetup(**{"block_size": BLOCK_SIZE, **setup, "kv_role": role})


def _ports() -> Any:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return mock.patch.dict(os.environ, {PORT: str(free.getsockname()[1])})
