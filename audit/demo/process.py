"""What a quiet, repeatable engine run needs of its process, before vLLM is imported.

Here: environment, bytecode, and where output goes. Nothing here knows the engine.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def settle_environment(*, in_process: bool) -> None:
    """What must stand in the environment before vLLM is imported."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0" if in_process else "1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",  # sums in one order: digests that can be compared
        TOKENIZERS_PARALLELISM="false",
    )


def share_bytecode(folder: Path) -> None:
    """Where bytecode isn't kept, keeps it in `folder`: EngineCore will import it all again.

    Compiling vLLM and what it needs takes ten seconds, a process.
    """
    torch = importlib.util.find_spec("torch")
    kept = torch and torch.origin and Path(importlib.util.cache_from_source(torch.origin)).exists()
    if sys.dont_write_bytecode and not kept:
        sys.dont_write_bytecode = False
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(folder)


@contextmanager
def quiet(log: Path) -> Iterator[tuple[TextIO, TextIO]]:
    """Sends this process's output, and its children's, to `log`; yields the outputs of before."""
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
