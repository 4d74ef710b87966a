"""Run the demo's engine several times with one import of vLLM, each run in a fork of this process.

Usage: `python forked.py FOLDER RUN...`, where a run is the name of an injection or `seed-N`. Each run writes
RUN.json, the output of engine.py, and RUN.seen.json: the preemptions, admissions and negative matches of the
real scheduler. No counter has these figures, so this program records them, except of a method that an
injection replaces.
"""

import functools
import gc
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvledger.audit.demo import engine
from kvledger.audit.demo.engine import settle_environment

IMPORTED_ONCE = (
    "vllm.entrypoints.llm",
    "vllm.distributed.kv_transfer.kv_connector.v1.example_connector",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.cpu_worker",
)


def record_decisions(seen: dict[str, Any]) -> None:
    """Wrap three methods of the real engine; the methods still do the same."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt, allocate = Scheduler._preempt_request, KVCacheManager.allocate_slots
    match = ExampleConnector.get_num_new_matched_tokens

    @functools.wraps(preempt)
    def preempting(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        seen["preempted"].append("decode" if request.num_output_tokens else "prefill")
        return preempt(self, request, *args, **kwargs)

    @functools.wraps(allocate)
    def allocating(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = allocate(self, request, *args, **kwargs)
        if blocks is not None and "new_computed_blocks" in kwargs:
            local, external = kwargs["num_new_computed_tokens"], kwargs["num_external_computed_tokens"]
            name = request.request_id.rpartition("-")[0]
            seen["admitted"].setdefault(name, []).append((local, external))
        return blocks

    @functools.wraps(match)
    def matching(self: Any, *args: Any) -> Any:
        answer = match(self, *args)
        if answer[0] < 0:
            seen["negative_matches"].append(answer[0])
        return answer

    Scheduler._preempt_request, KVCacheManager.allocate_slots = preempting, allocating
    ExampleConnector.get_num_new_matched_tokens = matching


def run(folder: Path, name: str) -> int:
    seen: dict[str, Any] = {"preempted": [], "admitted": {}, "negative_matches": []}
    record_decisions(seen)
    chosen = ["--seed", name[5:]] if name.startswith("seed-") else ["--inject", name]
    output = ["--output", str(folder / f"{name}.json"), "--log", str(folder / f"{name}.log")]
    code = engine.main(["--in-process", *chosen, *output])
    (folder / f"{name}.seen.json").write_text(json.dumps(seen))
    return code


def main(folder: Path, names: list[str], run: Callable[[Path, str], int] = run) -> int:
    settle_environment(in_process=True)
    for module in IMPORTED_ONCE:
        importlib.import_module(module)
    gc.freeze()  # otherwise a garbage collection in a child would copy the pages of all these objects

    failed = 0
    for name in names:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = run(folder, name)
            finally:
                os._exit(code)
        failed |= os.waitpid(child, 0)[1]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
