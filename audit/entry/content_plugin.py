"""The plugin at level ``content``: each worker's model runner is observed once it is warmed up.

vLLM creates the KV caches in ``initialize_from_config`` and warms up in ``compile_or_warm_up_model``, which
may execute steps that no scheduler planned. The observation begins after both.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

logger = logging.getLogger("kvledger")
vllm_logger = logging.getLogger("vllm.kvledger")
"""Below vLLM's own logger, so that operators see its lines among the engine's."""

_MARK = "__kvledger__"


def observe_once_warm(worker: Any) -> None:
    """Observe a worker when its warm-up has returned."""
    original = worker.compile_or_warm_up_model
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def compile_or_warm_up_model(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not observed:
            observed.append(observe_contents(worker))
        return result

    observed: list[object] = []
    setattr(compile_or_warm_up_model, _MARK, True)
    worker.compile_or_warm_up_model = compile_or_warm_up_model


def observe_contents(worker: Any) -> object | None:
    """Observe the model runner of a worker, into a journal in ``$KVLEDGER_DIR``; None if it can't be.

    Never raises: the engine runs on, observed at level ``blocks``, and one log line says why.
    """
    from ..engines.content.layout import UnknownLayout

    try:
        from ..engines import host_version
        from ..engines.content.attached import ContentObserver
        from .attach import recorder_in_folder

        recorder = recorder_in_folder("worker")
        observer = ContentObserver(worker, recorder, host_version())
        recorder.on_exit = functools.partial(observer.stop, "exit")
        logger.info("kvledger checks the contents of a worker's blocks into %s", recorder.folder.name)
        return observer
    except UnknownLayout as unknown:
        vllm_logger.warning("kvledger does not check the contents of blocks: %s", unknown)
    except Exception as error:  # serving goes on unobserved
        vllm_logger.warning(
            "kvledger does not check the contents of blocks: %s: %s", type(error).__name__, error
        )
    return None
