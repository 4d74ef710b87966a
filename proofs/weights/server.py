"""A server whose weights change by vLLM's own endpoints, observed by the plugin."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.serving.processes import Engine

from kvledger.audit.entry.weights import weights_of_request
from kvledger.audit.replay.journals import audit_paths
from kvledger.audit.replay.observers import KeptAccounts

from .engine import BLOCK, TOP, Served, State, weights_folder
from .scenarios import A, B
from .subject import Result

OUTPUTS = 8


class Observed(Engine):
    """A server for trainers, at level ``blocks``."""

    def command(self) -> list[str]:
        """The command line."""
        options = {
            "model": weights_folder(self.folder, 0),
            "served-model-name": "tiny",
            "dtype": "float32",
            "block-size": BLOCK,
            "num-gpu-blocks-override": 64,
            "max-model-len": 320,
            "distributed-executor-backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
            "weight-transfer-config": json.dumps({"backend": "folder"}),
            "host": "127.0.0.1",
            "port": self.port,
        }
        asked = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [
            sys.executable,
            "-m",
            "proofs.weights.api_server",
            "--skip-tokenizer-init",
            "--enforce-eager",
            *asked,
        ]

    def environment(self) -> dict[str, str]:
        """Additional environment variables."""
        return super().environment() | {"KVLEDGER_LEVEL": "blocks"}

    def post(self, path: str, **body: Any) -> Any:
        """Call an endpoint."""
        data = json.dumps(body).encode() if body else b""
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(self.address + path, data, headers, method="POST")
        with urllib.request.urlopen(asked, timeout=120) as response:
            return json.loads(response.read() or b"null")

    def serve(self, prompt: list[int], weights: Path) -> tuple[str, Served]:
        """One completion with the log-probabilities of its tokens."""
        asked = {
            "prompt": prompt,
            "max_tokens": OUTPUTS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": TOP,
        }
        asked |= {"return_tokens_as_token_ids": True, "return_token_ids": True}
        answer = self.post("/v1/completions", model="tiny", **asked)
        choice = answer["choices"][0]
        scores = [
            {int(token.partition(":")[2]): score for token, score in at.items()}
            for at in choice["logprobs"]["top_logprobs"]
        ]
        states = [State(weights)] * OUTPUTS
        return answer["id"], Served(prompt, choice["token_ids"], scores, states)


def _update(server: Observed, folder: str) -> None:
    server.post("/pause?mode=wait&clear_cache=false")
    server.post("/start_weight_update")
    server.post("/update_weights", update_info={"folder": folder})
    server.post("/finish_weight_update", weight_version=Path(folder).name)
    server.post("/resume")


def _reload(server: Observed, folder: str) -> None:
    server.post("/collective_rpc", method="reload_weights", kwargs={"weights_path": folder})


def _asleep(server: Observed, folder: str) -> None:
    server.post("/sleep?level=1")
    server.post("/wake_up")
    _reload(server, folder)


WAYS: tuple[tuple[Callable[[Observed, str], None], bool], ...] = (
    (_update, True),
    (_update, False),
    (_reload, True),
    (_reload, False),
    (_asleep, False),
)
"""How weights change, and whether the caller resets the prefix cache afterwards."""


def serve(folder: Path, updates: int) -> tuple[Result, list[str]]:
    """Change the weights so often; what was served, and the last lines that `kvledger audit` prints of it."""
    journals = folder / "journals"
    server = Observed(folder, journals)
    served: dict[str, Served] = {}
    server.start()
    try:
        weights = weights_folder(folder, 0)
        for number in range(updates + 1):
            if number:
                weights = weights_folder(folder, number)
                change, reset = WAYS[number % len(WAYS)]
                change(server, str(weights))
                if reset:
                    server.post("/reset_prefix_cache")
            served |= dict(server.serve(prompt, weights) for prompt in (A, [*A, 9], B[: 64 + number]))
    finally:
        server.stop()
    command = [sys.executable, "-m", "kvledger", "audit", str(journals)]
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return _judged(served, journals), printed.splitlines()


def _judged(served: dict[str, Served], journals: Path) -> Result:
    """What the journal says of each output token."""
    audit = audit_paths([journals], (KeptAccounts,))
    accounts = [
        (engine.auditor.ledger.weights, account)
        for engine in audit.engines
        for account in engine.of(KeptAccounts).sums
    ]
    result = Result(served, {}, {}, {}, [f"{one.id} ({one.findings})" for one in audit.found])
    for name, one in served.items():
        (use,) = (weights_of_request(*of) for of in accounts if of[1].request_id.startswith(f"{name}-"))
        result.suspect[name], result.unknown[name] = use.suspect_mask().tolist(), use.unknown_mask().tolist()
        result.oldest[name] = [None] * len(one.tokens)
    return result
