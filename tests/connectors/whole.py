"""Whole engines with a connector, audited while they run. vLLM is imported once; each run is a fork.

`python -m tests.connectors.whole FOLDER RUN...` writes RUN.json for each run: the verdict, the findings, the
ledger's totals, the tokens that the store served by its own count, and the account statements of the
preempted requests. A run whose name ends in `-again` or `-outage` starts a new engine on the store that the
run without this ending has filled. `outage` and every `-outage` run take the store down midway.
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

from kvledger.audit.demo.engine import EXECUTOR, tiny_engine
from kvledger.audit.demo.model import write_model
from kvledger.audit.events import EngineStarted

BLOCK_TOKENS = 32
_RETRIEVED = re.compile(r"Retrieved (\d+) (?:tokens in|out of)")
CHILD = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


def options(name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """The name of a run's connector, and its options; a store on disk is under ``folder``."""
    if name == "offloading":
        spec = {"spec_name": "CopyingSpec", "spec_module_path": "kvledger.audit.conformance.cpu_offloading"}
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
    stores = [str(folder / name / part) for part in ("first", "second")]
    if name == "multi":
        children = [{**CHILD, "kv_connector_extra_config": {"shared_storage_path": s}} for s in stores]
        return "MultiConnector", {"connectors": children}
    return "ExampleConnector", {"shared_storage_path": stores[0]}


def start(folder: Path, name: str, executor: str = EXECUTOR) -> Any:
    """Start a real engine with too few blocks for its requests, so that it preempts."""
    from vllm.config import KVTransferConfig

    connector, extra = options(name, folder)
    return tiny_engine(
        write_model(folder / f"{name}.model", 0),
        distributed_executor_backend=executor,
        num_gpu_blocks_override=9,
        max_model_len=224,
        disable_log_stats=False,  # without statistics vLLM does not ask for tiers
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
    """Run prompts that share prefixes and preempt each other; empty the local cache in between.

    ``outage`` may take the store down.
    """
    from vllm import SamplingParams

    def prompts(*tokens: int) -> list[Any]:
        return [{"prompt_token_ids": [(7 * n + 3) % 500 for n in range(count)]} for count in tokens]

    def generate(count: int, *tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        llm.generate(prompts(*tokens), sampling, use_tqdm=False)

    generate(2, 100, 131)
    reset(llm)
    generate(24, 100, 131, 66)
    outage(llm)
    reset(llm)
    generate(60, 100, 70, 66)
    reset(llm)
    # A reset under running requests breaks OffloadingConnector, as its score card shows.
    if type(connector_of(llm)).__name__ != "OffloadingConnector":
        reset_midway(llm, 10)
    generate(40, 100, 70)


def connector_of(llm: Any) -> Any:
    """The scheduler side of the engine's connector."""
    return llm.llm_engine.engine_core.engine_core.scheduler.connector


def reset(llm: Any) -> None:
    """Empty the local cache. vLLM refuses while LMCache holds blocks that it still saves, so try again."""
    for _ in range(200):
        if llm.reset_prefix_cache():
            return
        llm.llm_engine.step()
        time.sleep(0.05)
    raise AssertionError("the local cache can't be emptied")


def reset_midway(llm: Any, output_tokens: int) -> None:
    """Empty the local cache and preempt all requests once each has ``output_tokens`` tokens of output."""
    engine = llm.llm_engine
    step, requests = engine.step, engine.engine_core.engine_core.scheduler.requests

    def step_and_reset() -> Any:
        outputs = step()
        midway = requests and all(r.num_output_tokens >= output_tokens for r in requests.values())
        if midway and llm.reset_prefix_cache(reset_running_requests=True):
            engine.step = step
        return outputs

    engine.step = step_and_reset


def outage_of(name: str) -> Callable[[Any], None]:
    """The function that takes a run's store down midway; without an outage it does nothing."""
    if name == "outage":
        from tests.conformance.connectors import FailingConnector

        return lambda _: setattr(FailingConnector, "down", True)
    return kill_at_promise if name.endswith("-outage") else lambda _: None


def kill_at_promise(llm: Any) -> None:
    """Kill the server after the connector has promised external tokens, and before it loads them."""
    connector = connector_of(llm)
    update_state_after_alloc = connector.update_state_after_alloc

    def update_and_kill(request: Any, blocks: Any, num_external_tokens: int) -> None:
        update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens > 0:
            # Assign, don't delete: the attribute may be an observer's wrapper.
            connector.update_state_after_alloc = update_state_after_alloc
            os.kill(int(os.environ["LMCACHE_SERVER"]), signal.SIGKILL)

    connector.update_state_after_alloc = update_and_kill


class ServedTokens:
    """Counts the tokens that the store serves, from its log or from the copies below the connector."""

    def __init__(self, name: str) -> None:
        self._tokens = 0
        self._log = Path(os.environ["LMCACHE_SERVER_LOG"]) if name == "lmcache" else None
        self._logged_before = self._logged_by_server()
        if name == "offloading":
            self._count_copies()
        elif name == "lmcache-v1":
            logging.getLogger("lmcache.v1.cache_engine").addFilter(self._count_logged)

    @property
    def tokens(self) -> int:
        return self._tokens + self._logged_by_server() - self._logged_before

    def _logged_by_server(self) -> int:
        """LMCache's server logs each load as "Retrieved 96 tokens in 0.002 seconds"."""
        return sum(map(int, _RETRIEVED.findall(self._log.read_text()))) if self._log is not None else 0

    def _count_logged(self, record: logging.LogRecord) -> bool:
        """Without that server, LMCache in the worker logs each load: "Retrieved 96 out of 96 required"."""
        self._tokens += sum(map(int, _RETRIEVED.findall(record.getMessage())))
        return True

    def _count_copies(self) -> None:
        from kvledger.audit.conformance.cpu_offloading import CopyingWorker

        submit_load = CopyingWorker.submit_load

        def count_and_submit(worker: Any, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            self._tokens += len(dst_spec.block_ids) * BLOCK_TOKENS
            return submit_load(worker, job_id, src_spec, dst_spec)

        CopyingWorker.submit_load = count_and_submit  # type: ignore[method-assign]


def run(folder: Path, name: str) -> int:
    import kvledger

    if name == "process":
        return run_process(folder)
    store = name.removesuffix("-again").removesuffix("-outage")
    if store.startswith("lmcache"):
        prepare_lmcache(store)
    served = ServedTokens(store)
    llm = start(folder, store)
    os.environ["KVLEDGER_CONTENT_STORE"] = "own"
    level = "tokens" if name.endswith("outage") else "content"
    with kvledger.attach(llm, level=level) as audit:
        serve(llm, outage_of(name))
    llm.llm_engine.engine_core.shutdown()
    statements = [account.freeze() for account in audit.ledger.accounts()]
    results = {
        "verdict": audit.verdict,
        "violations": [finding.id for finding in audit.violations],
        "drifts": [finding.id for finding in audit.drifts],
        "totals": msgspec.to_builtins(audit.totals),
        "settled": [msgspec.to_builtins(statement.settled) for statement in statements],
        "given": served.tokens,
        "heard": list(audit.ledger.transfers.aligned.values()),
        "moved": dict(audit.ledger.sums.transfers),
        "preempted": [msgspec.to_builtins(statement) for statement in statements if statement.preemptions],
    }
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1))
    return 0


def run_process(folder: Path) -> int:
    """Run a worker in its own process, observed by the plugin: two journals, audited together."""
    from kvledger.audit.journal.host_folders import read
    from kvledger.audit.replay.journals import audit_paths

    os.environ["KVLEDGER_DIR"] = str(folder / "journals")
    llm = start(folder, "process", "mp")
    serve(llm, lambda _: None)
    llm.llm_engine.engine_core.shutdown()
    audit = audit_paths([folder / "journals"])
    journals = sorted((folder / "journals").iterdir())
    starts = [next(read(journal))[1] for journal in journals]
    results = {
        "verdict": audit.verdict,
        "totals": msgspec.to_builtins(audit.totals),
        "journals": [journal.name.partition("-")[0] for journal in journals],
        "processes": [event.process_id for event in starts if isinstance(event, EngineStarted)],
        "heard": list(audit.engines[0].auditor.ledger.transfers.aligned.values()),
    }
    (folder / "process.json").write_text(json.dumps(results, indent=1))
    return 0


def prepare_lmcache(name: str) -> None:
    """Make the real LMCache run on a machine without a GPU."""
    from vllm.triton_utils import dispatcher

    # The dispatcher inspects every imported module, and some of LMCache's modules raise when inspected.
    dispatcher._rebind_kernels = lambda *_, **__: None
    if name == "lmcache-v1":
        from kvledger.audit.conformance.cpu_lmcache import install

        install()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:], run))
