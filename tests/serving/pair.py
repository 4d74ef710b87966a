"""A prefill engine and a decode engine, with a proxy before them as routers of vLLM and llm-d work.

`python -m tests.serving.pair CONNECTOR FOLDER` runs both servers and a few calls. FOLDER then has the
journals of both engines and the log of what clients were told. LMCacheMPConnector needs a server of LMCache,
whose port is in ``LMCACHE_SERVER_PORT``.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.serving.processes import (
    BLOCK_TOKENS,
    ROOT,
    START_SECONDS,
    Engine,
    lasting_port,
    wait_until,
)

NIXL_FOLDER = ROOT / ".releases" / "nixl-1.5.1"
LMCACHE_FOLDER = ROOT / ".releases" / "lmcache-0.5.6"
TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""``kv_transfer_params`` with which routers send a prompt to a prefill engine."""

PLAIN, SHARING = 4, 2
"""Calls with a prompt of their own, and calls that share the first two blocks with the first call."""


class PairedEngine(Engine):
    """One server of a pair. Both write their journals into one folder."""

    def __init__(self, folder: Path, role: str, connector: str, **variables: str) -> None:
        super().__init__(folder, folder / "journals", role)
        self.role = role
        self._connector = connector
        self._variables = variables
        self._side_channel = lasting_port()

    def command(self) -> list[str]:
        command = super().command()
        transfer = {
            "kv_connector": self._connector,
            "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[self.role],
            "kv_connector_extra_config": {"shared_storage_path": str(self.folder / "store")},
        }
        if self._connector == "NixlConnector":
            lease = self._variables.get("LEASE_SECONDS")
            transfer["kv_connector_extra_config"] = {"kv_lease_duration": int(lease)} if lease else {}
            transfer["kv_buffer_device"] = "cpu"
            if "CHANGED_REQUEST" in self._variables:
                command[command.index("-m") + 1] = "tests.serving.nixl_api_server"
        elif self._connector == "LMCacheMPConnector":
            port = int(os.environ["LMCACHE_SERVER_PORT"])
            transfer["kv_connector_extra_config"] = {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": port,
                "lmcache.mp.mq_timeout": 5,
                "lmcache.mp.heartbeat_interval": 1,
            }
            command[command.index("-m") + 1] = "tests.serving.lmcache_api_server"
        command[command.index("--kv-transfer-config") + 1] = json.dumps(transfer)
        command[command.index("--num-gpu-blocks-override") + 1] = "128"
        command += ["--enable-prompt-tokens-details"]
        if self.role == "decode":
            command += ["--middleware", "kvledger.exporters.usage_middleware.UsageLog"]
        return command

    def environment(self) -> dict[str, str]:
        paths = [str(ROOT / "src"), str(ROOT)]
        more = {}
        if self._connector == "NixlConnector":
            paths.insert(0, str(NIXL_FOLDER))
        elif self._connector == "LMCacheMPConnector":
            paths.append(str(LMCACHE_FOLDER))
            more = {
                "LMCACHE_TRACK_USAGE": "false",
                "LMCACHE_DISABLE_BANNER": "1",
                "PYTHONHASHSEED": "0",  # keys in the store are hashes
            }
        return {
            **super().environment(),
            "PYTHONPATH": os.pathsep.join(paths),
            "KVLEDGER_USAGE_LOG": str(self.folder / "usage.jsonl"),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._side_channel),
            **more,
            **self._variables,
        }

    def answer(self, request_id: str, **asked: Any) -> dict[str, Any]:
        """The answer to one completion."""
        result: dict[str, Any] = json.loads(self.body(request_id, **asked))
        return result

    def body(self, request_id: str, **asked: Any) -> bytes:
        """The whole body of the answer to one completion."""
        connection = self._request(request_id, asked)
        with connection.getresponse() as response:
            text = response.read()
            assert response.status == 200, text
        return text

    def leave(self, request_id: str, **asked: Any) -> None:
        """Disconnect after the start of the answer, so that the server aborts the request."""
        connection = self._request(request_id, asked | {"stream": True})
        connection.getresponse().read(1)
        connection.close()

    def _request(self, request_id: str, asked: dict[str, Any]) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        body = {"model": "tiny", "temperature": 0, "ignore_eos": True, "detokenize": False} | asked
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        return connection


class Pair:
    """Both servers, and what the proxy before them does."""

    def __init__(self, folder: Path, connector: str, **variables: str) -> None:
        (folder / "journals").mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.prefill = PairedEngine(folder, "prefill", connector, **variables)
        self.decode = PairedEngine(folder, "decode", connector, **variables)
        self._connector = connector

    def start(self) -> None:
        """Start both servers and wait until they are ready."""
        for engine in (self.prefill, self.decode):
            engine.launch()
        for engine in (self.prefill, self.decode):
            wait_until(engine.answers, 3 * START_SECONDS, engine.last_words)

    def complete(self, request_id: str, prompt: list[int], max_tokens: int = 4) -> dict[str, Any]:
        """Have the prompt prefilled for one token, then answered by the decode engine."""
        return self.decoded(request_id, prompt, self.prefilled(request_id, prompt), max_tokens)

    def prefilled(self, request_id: str, prompt: list[int]) -> dict[str, Any] | None:
        """The ``kv_transfer_params`` that the prefill engine answers with; a shared store needs none."""
        answer = self.prefill.answer(request_id, prompt=prompt, max_tokens=1, kv_transfer_params=TO_PREFILL)
        transfer: dict[str, Any] | None = answer.get("kv_transfer_params")
        return transfer

    def decoded(
        self, request_id: str, prompt: list[int], transfer: dict[str, Any] | None, max_tokens: int = 4
    ) -> dict[str, Any]:
        """The decode engine's answer to a prompt that was prefilled."""
        more = {"kv_transfer_params": transfer} if transfer else {}
        return self.decode.answer(request_id, prompt=prompt, max_tokens=max_tokens, **more)

    def end(self) -> None:
        """End both engines, so that their journals are complete."""
        for engine in (self.prefill, self.decode):
            engine.terminate()
        for engine in (self.prefill, self.decode):
            engine.stop()

    def kill(self) -> None:
        """End what still runs, without waiting for journals."""
        for engine in (self.prefill, self.decode):
            engine.kill()


def prompt(number: int, blocks: int = 2) -> list[int]:
    """A prompt of whole blocks and seven tokens; those of one number share their beginning."""
    return [(number * 31 + place) % 90 + 3 for place in range(blocks * BLOCK_TOKENS + 7)]


def load(pair: Pair) -> None:
    """A few calls, of which the last ones share the prefix of the first."""
    for number in range(PLAIN):
        pair.complete(f"call-{number}", prompt(number))
    for number in range(SHARING):
        pair.complete(f"sharing-{number}", [*prompt(0)[: 2 * BLOCK_TOKENS], *prompt(50 + number)])


def main(connector: str, folder: str) -> None:
    pair = Pair(Path(folder).absolute(), connector)
    try:
        pair.start()
        load(pair)
        pair.end()
    finally:
        pair.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
