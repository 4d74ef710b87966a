"""Whole engines with a connector, each in a fork of one import of vLLM, audited as they run.

`python -m tests.connectors.whole FOLDER RUN...` leaves RUN.json: the verdict, findings and doubts, the
ledger's totals, what the store itself gave, and the statement of a preempted request. Runs that end
in `-again` are new engines on the store that the run of that name has left, those in `-outage` too: it is
taken down in their midst.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from tests.demo.forked import main

from kvledger.audit.demo.engine import EXECUTOR
from kvledger.audit.demo.model import write_model
from kvledger.audit.events import EngineStarted

BLOCK_TOKENS = 32
_RETRIEVED = re.compile(r"Retrieved (\d+) (?:tokens in|out of)")
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
        if name == "lmcache-v1":
            chunks = {"lmcache.chunk_size": BLOCK_TOKENS, "lmcache.save_unfull_chunk": False}
            store = {"lmcache.local_cpu": False, "lmcache.remote_url": f"lm://127.0.0.1:{port}"}
            return "LMCacheConnectorV1", {**chunks, **store, "lmcache.max_local_cpu_size": 0.1}
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


def start(folder: Path, name: str, executor: str = EXECUTOR) -> Any:
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
        distributed_executor_backend=executor,
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


def serve(llm: Any, outage: Callable[[Any], None]) -> None:
    """Shared prefixes and preemptions, the local cache emptied in between; the store may go down."""
    from vllm import SamplingParams

    def prompts(*tokens: int) -> list[Any]:
        return [{"prompt_token_ids": [(7 * n + 3) % 500 for n in range(count)]} for count in tokens]

    def ask(count: int, *tokens: int) -> None:
        how = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        llm.generate(prompts(*tokens), how, use_tqdm=False)

    ask(2, 100, 131)
    reset(llm)
    ask(24, 100, 131, 66)
    outage(llm)
    reset(llm)
    ask(60, 100, 70, 66)
    reset(llm)
    if type(connector_of(llm)).__name__ != "OffloadingConnector":  # it breaks, as its score card says
        reset_midway(llm, 10)
    ask(40, 100, 70)


def connector_of(llm: Any) -> Any:
    """The scheduler's side of it."""
    return llm.llm_engine.engine_core.engine_core.scheduler.connector


def reset(llm: Any) -> None:
    """Empty the local cache. LMCache may keep blocks that it still saves: then it is refused."""
    for _ in range(200):
        if llm.reset_prefix_cache():
            return
        llm.llm_engine.step()
        time.sleep(0.05)
    raise AssertionError("the local cache can't be emptied")


def reset_midway(llm: Any, output_tokens: int) -> None:
    """Empty the local cache, and preempt all, when all that runs has so many tokens of output."""
    engine = llm.llm_engine
    step, requests = engine.step, engine.engine_core.engine_core.scheduler.requests

    def stepping() -> Any:
        outputs = step()
        midway = requests and all(r.num_output_tokens >= output_tokens for r in requests.values())
        if midway and llm.reset_prefix_cache(reset_running_requests=True):
            engine.step = step
        return outputs

    engine.step = stepping


def outage_of(name: str) -> Callable[[Any], None]:
    """What takes the store of a run down, in its midst."""
    if name == "outage":
        from tests.conformance.connectors import FailingConnector

        return lambda _: setattr(FailingConnector, "down", True)
    return kill_at_promise if name.endswith("-outage") else lambda _: None


def kill_at_promise(llm: Any) -> None:
    """Kill the server when it has been taken at its word, and before it was asked to keep it."""
    connector = connector_of(llm)
    promised = connector.update_state_after_alloc

    def killing(request: Any, blocks: Any, num_external_tokens: int) -> None:
        promised(request, blocks, num_external_tokens)
        if num_external_tokens > 0:
            connector.update_state_after_alloc = promised  # not ``del``: an observer's wrapper is there
            os.kill(int(os.environ["LMCACHE_SERVER"]), signal.SIGKILL)

    connector.update_state_after_alloc = killing


class Given:
    """Counts the tokens that the store gives, beneath the connector or in the store's own words."""

    def __init__(self, name: str) -> None:
        self._tokens = 0
        self._log = Path(os.environ["LMCACHE_SERVER_LOG"]) if name == "lmcache" else None
        self._before = self._said()
        if name == "offloading":
            self._count_copies()
        elif name == "lmcache-v1":
            logging.getLogger("lmcache.v1.cache_engine").addFilter(self._listen)

    @property
    def tokens(self) -> int:
        return self._tokens + self._said() - self._before

    def _said(self) -> int:
        """Of each load LMCache's server logs "Retrieved 96 tokens in 0.002 seconds"."""
        return sum(map(int, _RETRIEVED.findall(self._log.read_text()))) if self._log is not None else 0

    def _listen(self, record: logging.LogRecord) -> bool:
        """Without such a server it is LMCache itself, in the worker: "Retrieved 96 out of 96 required"."""
        self._tokens += sum(map(int, _RETRIEVED.findall(record.getMessage())))
        return True

    def _count_copies(self) -> None:
        from tests.conformance.cpu_offloading import CopyingWorker

        submit_load = CopyingWorker.submit_load

        def counting(worker: Any, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            self._tokens += len(dst_spec.block_ids) * BLOCK_TOKENS
            return submit_load(worker, job_id, src_spec, dst_spec)

        CopyingWorker.submit_load = counting  # type: ignore[method-assign]


def run(folder: Path, name: str) -> int:
    import kvledger

    if name == "process":
        return run_process(folder)
    store = name.removesuffix("-again").removesuffix("-outage")
    if store.startswith("lmcache"):
        settle_lmcache(store)
    given = Given(store)
    llm = start(folder, store)
    with kvledger.attach(llm) as audit:
        serve(llm, outage_of(name))
    llm.llm_engine.engine_core.shutdown()
    statements = [account.freeze() for account in audit.ledger.accounts()]
    told = {
        "verdict": audit.verdict,
        "violations": [violation.message for violation in audit.violations],
        "totals": msgspec.to_builtins(audit.totals),
        "settled": [msgspec.to_builtins(statement.settled) for statement in statements],
        "given": given.tokens,
        "heard": list(audit.ledger.transfers.aligned.values()),
        "preempted": [msgspec.to_builtins(statement) for statement in statements if statement.preemptions],
    }
    (folder / f"{name}.json").write_text(json.dumps(told, indent=1))
    return 0


def run_process(folder: Path) -> int:
    """With a worker in a process of its own, observed by the plugin: two journals, audited together."""
    from kvledger.audit.journal.folder import read
    from kvledger.audit.replay.journals import audit_paths

    os.environ["KVLEDGER_DIR"] = str(folder / "journals")
    llm = start(folder, "process", "mp")
    serve(llm, lambda _: None)
    llm.llm_engine.engine_core.shutdown()
    audit = audit_paths([folder / "journals"])
    journals = sorted((folder / "journals").iterdir())
    begun = [next(read(journal))[1] for journal in journals]
    told = {
        "verdict": audit.verdict,
        "totals": msgspec.to_builtins(audit.totals),
        "journals": [journal.name.partition("-")[0] for journal in journals],
        "processes": [event.process_id for event in begun if isinstance(event, EngineStarted)],
        "heard": list(audit.engines[0].auditor.ledger.transfers.aligned.values()),
    }
    (folder / "process.json").write_text(json.dumps(told, indent=1))
    return 0


def settle_lmcache(name: str) -> None:
    """What real LMCache asks of a machine without a GPU."""
    from vllm.triton_utils import dispatcher

    # It looks into every module that is there, and LMCache's do not all bear it.
    dispatcher._rebind_kernels = lambda *_, **__: None
    if name == "lmcache-v1":
        from tests.conformance.cpu_lmcache import install

        install()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:], run))
