"""Prepares a process for a repeatable engine run, before vLLM is imported.

Here: environment variables, bytecode, and where output goes. Not here: the engine.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def settle_environment(*, in_process: bool) -> None:
    """Set the environment variables that vLLM reads when it is imported."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0" if in_process else "1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",  # one order of summation, so that digests are comparable
        TOKENIZERS_PARALLELISM="false",
    )


def share_bytecode(folder: Path) -> None:
    """Keep bytecode in `folder` if this process writes none, because EngineCore imports everything again.

    Compiling vLLM and its dependencies takes ten seconds per process.
    """
    torch = importlib.util.find_spec("torch")
    kept = torch and torch.origin and Path(importlib.util.cache_from_source(torch.origin)).exists()
    if sys.dont_write_bytecode and not kept:
        sys.dont_write_bytecode = False
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(folder)


@contextmanager
def output_to(log: Path) -> Iterator[tuple[TextIO, TextIO]]:
    """Redirect this process's output, and its children's, to `log`; yields the original outputs."""
    with (
        os.fdopen(os.dup(1), "w") as stdout,
        os.fdopen(os.dup(2), "w") as stderr,
        log.open("wb") as sink,
    ):
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        try:
            yield stdout, stderr
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(stdout.fileno(), 1)
            os.dup2(stderr.fileno(), 2)
