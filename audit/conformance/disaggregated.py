"""Two engines of one connector: one prefills prompts, the other loads their KV and decodes.

Some connectors have no store, only engines. The driver takes the place of a router: a prompt that shares
a prefix with an earlier request goes to the prefilling engine first, for one token, and then, with the
``kv_transfer_params`` which that engine returned, to the decoding one. Both engines are in this process,
each with a worker and a KV cache; the connector moves the KV between them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any
from unittest import mock

from ..traffic.driver import EngineSetup
from .worker import DriverWithWorker

BLOCK_SIZE = 32
"""Transfers use the blocks of the attention backend; the CPU backend needs a multiple of 32 tokens."""
PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
"""The environment variable with an engine's port; engines on one machine need different ports."""
MAX_WAIT_STEPS = 400
"""Steps to wait for a prompt to be prefilled."""
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def prefilling(setup: dict[str, Any], salt: str) -> DriverWithWorker:
    """An engine that prefills and keeps the blocks until they were read."""
    with _free_port():
        return DriverWithWorker(_setup_of("kv_producer", setup), salt=salt)


def decoding(setup: dict[str, Any], salt: str, prefiller: DriverWithWorker) -> DecodingDriver:
    """An engine that loads what ``prefiller`` has prefilled."""
    with _free_port():
        return DecodingDriver(_setup_of("kv_consumer", setup), salt=salt, prefiller=prefiller)


def shut_down(driver: DriverWithWorker) -> None:
    """Shut an engine's connector down, so that it frees its ports and threads."""
    driver.worker.connector.shutdown()
    driver.connector.shutdown()


class DecodingDriver(DriverWithWorker):
    """The decoding engine, which a situation drives; the prefilling engine steps with it."""

    def __init__(self, setup: EngineSetup, *, salt: str, prefiller: DriverWithWorker) -> None:
        super().__init__(setup, salt=salt)
        self.prefiller = prefiller
        """Drives the engine that prefills."""

    def add(
        self,
        request_id: str,
        prompt_tokens: int | Sequence[int],
        max_tokens: int = 16,
        *,
        shares: tuple[str, int] | None = None,
        **how: Any,
    ) -> Any:
        """As for any driver; the other engine prefills the whole prompt of a request that shares a prefix."""
        prompt = self.prompt(request_id, prompt_tokens, shares)
        if shares:
            how["transfer"] = self._prefilled(f"{request_id} #{self._added}", prompt)
        return super().add(request_id, prompt, max_tokens, **how)

    def _prefilled(self, request_id: str, prompt: list[int]) -> dict[str, Any] | None:
        """Have the other engine prefill a prompt; returns the ``kv_transfer_params`` of its blocks."""
        self.prefiller.add(request_id, prompt, 1, transfer=TO_PREFILL)
        for _ in range(MAX_WAIT_STEPS):
            self.prefiller.step()
            for output in self.prefiller.delivered.get(request_id, ()):
                if output.finish_reason is not None:
                    transfer: dict[str, Any] | None = output.kv_transfer_params
                    return transfer
        raise RuntimeError(f"{request_id} was not prefilled in {MAX_WAIT_STEPS} steps")

    def step(self, **of_output: Any) -> dict[int, Any]:
        outputs = super().step(**of_output)
        self.prefiller.step()
        return outputs

    def run(self, max_steps: int = 3_000) -> None:
        """Step until neither engine has anything left to do."""
        super().run(max_steps)
        self.prefiller.run(max_steps)


def _setup_of(role: str, setup: dict[str, Any]) -> EngineSetup:
    return EngineSetup(**{"block_size": BLOCK_SIZE, **setup, "kv_role": role})


def _free_port() -> Any:
    """Set :data:`PORT` to a free port within the context."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return mock.patch.dict(os.environ, {PORT: str(free.getsockname()[1])})
