"""Observes in a worker's own process which calls that change weights it makes, and which of them fail.

The engine core of several workers sees that a call failed, and not on which of them; nor does it see what a
function of the caller does in a worker. The methods are those of the worker and the ``load_weights`` of its
model; none is part of a step. The journal begins with the first call: a worker whose weights stay has none.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .. import events as ev
from ..bounded_tables import keep_newest
from ..hooks import EngineMismatch, Wrapping
from .configuration import engine_key
from .connectors.worker_side import identity
from .step_log import Sink
from .weights_watch import CHANGING, first_argument
from .worker_journal import WorkerJournal

if TYPE_CHECKING:
    from .content.weight_digest import WeightDigest

logger = logging.getLogger("kvledger")

MOST_ADAPTERS = 4096
"""Adapters of which it is remembered that they were loaded; one that is forgotten counts as new."""


class _NoSteps:
    """Stands for a watch of steps, where nothing is wrapped and no steps are counted."""

    step = 0
    """The present step."""

    def remove(self) -> None:
        """Nothing is wrapped."""


class _Journal(WorkerJournal):
    """The journal of one worker's calls."""

    def __init__(self, sink: Sink, version: str, config: Any) -> None:
        super().__init__(sink, version, "weights", identity(config) | {"engine_key": engine_key(config)})
        self._watch = _NoSteps()
        self.begin((), None)

    def emit(self, event: ev.Event) -> None:
        """Append one event."""
        self.at_rest()
        self._log.emit(event)


class WorkerCalls:
    """Observes one worker. ``open_sink`` makes the recorder of its journal, with the first call.

    ``digests``: compare the tensors that every worker of the group holds whole, before and after each call.
    """

    def __init__(self, worker: Any, open_sink: Callable[[], Any], version: str, *, digests: bool) -> None:
        self._config = worker.vllm_config
        self._open = open_sink, version
        self._journal: _Journal | None = None
        """The journal; None before the first call."""
        self._made: Counter[str] = Counter()
        """Calls so far, by method."""
        self._adapters: dict[int, None] = {}
        """The ids of the adapters that calls loaded last, oldest first."""
        self._inside = 0
        """Calls that have not returned."""
        self._digest: WeightDigest | None = None
        """The digest; None: none is taken."""
        model = getattr(getattr(worker, "model_runner", None), "model", None)
        if digests and model is not None and self._config.parallel_config.pipeline_parallel_size == 1:
            from .content.weight_digest import WeightDigest, is_whole

            self._digest = WeightDigest(model, is_whole)
        methods = [(worker, name, name) for name in sorted(CHANGING)]
        methods += [(worker, ev.ADDS_ADAPTER, ev.ADDS_ADAPTER), (model, "load_weights", ev.MODEL_LOADS)]
        for owner, name, by in methods:
            if callable(getattr(owner, name, None)):
                with suppress(EngineMismatch):
                    Wrapping(owner, name, functools.partial(self._make, by))

    def _make(self, by: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            self._inside += 1
            raised = True
            try:
                result = original(*args, **kwargs)
                raised = False
                return result
            finally:
                self._inside -= 1
                if not self._inside:
                    self._ended(by, raised, first_argument(args, kwargs))

        return method

    def _ended(self, by: str, raised: bool, first: Any) -> None:
        """A call has ended; ``first`` is its first argument. Never raises: the worker runs on."""
        try:
            self._made[by] += 1
            if by == ev.ADDS_ADAPTER and not self._is_again(first):
                return  # no KV is of other weights
            if self._journal is None:
                open_sink, version = self._open
                sink = open_sink()
                self._journal = _Journal(sink, version, self._config)
                sink.on_exit = functools.partial(self._journal.stop, "exit")
            equal = None if self._digest is None or by == ev.ADDS_ADAPTER else self._digest.is_equal()
            rank, now = int(self._config.parallel_config.rank), self._journal._log.now()
            self._journal.emit(ev.WorkerWeights(now, rank, by, self._made[by], raised, equal))
        except Exception as error:
            logger.warning("kvledger does not see this worker's weights: %s: %s", type(error).__name__, error)

    def _is_again(self, request: Any) -> bool:
        """Whether an adapter's request may replace an adapter."""
        number = int(request.lora_int_id)
        again = number in self._adapters or bool(getattr(request, "load_inplace", False))
        self._adapters.pop(number, None)
        self._adapters[number] = None
        keep_newest(self._adapters, MOST_ADAPTERS)
        return again
