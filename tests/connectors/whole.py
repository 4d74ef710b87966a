"""Whole engines with a connector, each in a fork of one import of vLLM, audited as they run.

`python -m tests.connectors.whole FOLDER RUN...` leaves RUN.json: the verdict, findings and doubts, the
ledger's totals, what the store itself gave, and the statement of a preempted request. Runs that end
in `-again` are new engines on the store that the run of that name has left, those in `-outage` too: it is
taken down in their midst.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from tests.demo.forked import main

from kvledger.audit.demo.engine import EXECUTOR
from kvledger.audit.demo.model import write_model

BLOCK_TOKENS = 32
CHILD = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


def options(name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """A connector and its configuration; its store, where it is one, is under ``folder``."""
    if name == "offloading":
        spec = {"spec_name": "CopyingSpec", "spec_module_path": "tests.conformance.cpu_offloading"}
        return "OffloadingConnector", {**spec, "cpu_bytes_to_use": 1 << 26}
    if name == "outage":
        return "FailingConnector", {"store": name}
    if name.startswith("lmcache"):
        port = int(os.environ["LMCACHE_SERVER_PORT"])
        server = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
        return "LMCacheMPConnector", {
            **server,
            "lmcache.mp.mq_timeout": 5,
            "lmcache.mp.heartbeat_interval": 1,
        }
    stores = [str(folder / name / place) for place in ("first", "second")]
    if name == "multi":
        children = [{**CHILD, "kv_connector_extra_config": {"shared_storage_path": s}} for s in stores]
        return "MultiConnector", {"connectors": children}
    return "ExampleConnector", {"shared_storage_path": stores[0]}


def start(folder: Path, name: str) -> Any:
    """A real engine with too few blocks for what it is asked."""
    from vllm import LLM, ModelRegistry
    from vllm.config import KVTransferConfig
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    ModelRegistry.register_model("Qwen3ForCausalLM", Qwen3ForCausalLM)
    connector, extra = options(name, folder)
    return LLM(
        model=str(write_model(folder / f"{name}.model", 0)),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        distributed_executor_backend=EXECUTOR,
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=9,
        max_model_len=224,
        max_num_seqs=3,
        max_num_batched_tokens=256,
        scheduler_reserve_full_isl=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path="tests.conformance.connectors" if name == "outage" else None,
            kv_role="kv_both",
            kv_connector_extra_config=extra,
            kv_load_failure_policy="recompute",
        ),
    )


def serve(llm: Any, outage: Callable[[], None], lmcache: bool) -> None:
    """Shared prefixes and preemptions, the local cache emptied in between; the store may go down."""
    from vllm import SamplingParams

    def prompts(*tokens: int) -> list[Any]:
        return [{"prompt_token_ids": [(7 * n + 3) % 500 for n in range(count)]} for count in tokens]

    def ask(count: int, *tokens: int) -> None:
        how = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        llm.generate(prompts(*tokens), how, use_tqdm=False)

    def reset() -> None:
        """LMCache may keep a block that it still saves, and the reset is refused: the pool is small."""
        assert llm.reset_prefix_cache() or lmcache

    ask(2, 100, 131)
    reset()
    ask(24, 100, 131, 66)
    outage()
    reset()
    ask(60, 100, 70, 66)


def outage_of(name: str) -> Callable[[], None]:
    """What takes the store of a run down, in its midst."""
    if name == "outage":
        from tests.conformance.connectors import FailingConnector

        return lambda: setattr(FailingConnector, "down", True)
    if name == "lmcache-outage":
        return lambda: os.kill(int(os.environ["LMCACHE_SERVER"]), signal.SIGKILL)
    return lambda: None


def given(name: str) -> dict[str, int]:
    """Counts what the store gives, beneath the connector, where it can be counted."""
    counted = {"tokens": 0}
    if name == "offloading":
        from tests.conformance.cpu_offloading import CopyingWorker

        submit_load = CopyingWorker.submit_load

        def counting(self: Any, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            counted["tokens"] += len(dst_spec.block_ids) * BLOCK_TOKENS
            return submit_load(self, job_id, src_spec, dst_spec)

        CopyingWorker.submit_load = counting  # type: ignore[method-assign]
    return counted


def run(folder: Path, name: str) -> int:
    import kvledger

    if name.startswith("lmcache"):
        from vllm.triton_utils import dispatcher

        # It looks into every module that is there, and LMCache's do not all bear it.
        dispatcher._rebind_kernels = lambda *_, **__: None
    store = name.removesuffix("-again").removesuffix("-outage")
    counted = given(store)
    llm = start(folder, store)
    with kvledger.attach(llm) as audit:
        serve(llm, outage_of(name), name.startswith("lmcache"))
    llm.llm_engine.engine_core.shutdown()
    told = {
        "verdict": audit.verdict,
        "violations": [violation.message for violation in audit.violations],
        "totals": msgspec.to_builtins(audit.totals),
        "given": counted["tokens"],
        "preempted": [
            msgspec.to_builtins(account.freeze())
            for account in audit._auditor.ledger.accounts()
            if account.preemptions
        ],
    }
    (folder / f"{name}.json").write_text(json.dumps(told, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:], run))
