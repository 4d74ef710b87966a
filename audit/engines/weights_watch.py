"""Observes the calls by which the weights of a running engine change, and numbers the changes.

A call of ``EngineCore`` reaches all workers, in the order of the steps: a step that was scheduled before the
call runs under the weights of before. The methods are wrapped on vLLM's class, because nothing that a
scheduler has leads to its ``EngineCore``. They are no part of a step, so a step costs nothing. Where the
worker runs in this process, the ``load_weights`` of its model is wrapped too: trainers call it directly.

What is not seen: writes into parameters by other code, and by other processes through shared memory. A
trainer declares them with :func:`mark_weights`.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from .. import events as ev
from ..bounded_tables import keep_newest
from ..hooks import EngineMismatch, Wrapping
from .configuration import engine_key, workers
from .connectors.worker_side import identity
from .source_files import engine_core
from .step_log import Sink, StepLog
from .worker_journal import WorkerJournal

if TYPE_CHECKING:
    from .content.weight_digest import WeightDigest

logger = logging.getLogger("kvledger")

CHANGING = frozenset(
    ("reload_weights", "update_weights", "finish_weight_update", "reset_weights", "load_weights")
)
"""Methods of vLLM's workers whose purpose is to change weights."""

HARMLESS = frozenset(
    (
        *("add_lora", "remove_lora", "pin_lora", "list_loras", "sleep", "wake_up", "discard"),
        *("execute_model", "sample_tokens", "execute_dummy_batch", "take_draft_token_ids"),
        *("get_model", "get_draft_model", "get_model_inspection", "supports_draft_weight_updates"),
        *("start_weight_update", "start_draft_weight_update"),
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "compute_weight_checksums"),
        *("profile", "check_health", "synchronize_device", "get_supported_tasks", "vocab_size"),
        *("reset_mm_cache", "reset_encoder_cache", "get_encoder_timing_stats", "get_compilation_match_table"),
        *("determine_available_memory", "get_kv_cache_spec", "get_cache_block_size_bytes"),
        *("initialize_cache", "initialize_from_config", "compile_or_warm_up_model"),
        *("update_max_model_len", "update_config", "get_kv_connector_handshake_metadata"),
        *("save_sharded_state", "save_tensorized_model", "elastic_ep_execute", "handle_ft_command"),
        "release_late_interaction_query_cache",
    )
)
"""Methods of vLLM's workers that leave weights as they are, or that other calls are observed for."""

NEVER = float("inf")

DRAFT = "draft model"
"""Stands for the draft model where other names are those of adapters: no request's KV depends on it."""

LOADS_ADAPTER = "add_adapter"
"""vLLM's method by which a worker loads the adapter of a request; no call of the engine leads to it."""

DISCARDED_FROM = 2
"""From this level of sleep on, the weights are gone until they are loaded again."""

CORE_METHODS = ("collective_rpc", "add_lora", "remove_lora", "sleep", "wake_up", "set_weight_version")
"""Methods of ``EngineCore`` that are wrapped, as far as a release has them."""

_watches: weakref.WeakKeyDictionary[Any, WeightsWatch] = weakref.WeakKeyDictionary()
"""By scheduler: who observes its engine's weights."""
_covered: dict[tuple[type, str], Callable[..., Any]] = {}
"""The methods of ``EngineCore`` as they were, while any engine of this process is observed."""
_workers: weakref.WeakSet[Any] = weakref.WeakSet()
"""The workers that were made in this process since the plugin was loaded."""


def mark_weights(label: str = "", adapter: str = "") -> int:
    """Declare that the weights have just changed, for every engine that is observed in this process.

    For changes that no hook sees. Call it between two steps, in the thread that runs the engine. ``label``
    names the new weights; ``adapter`` is a LoRA adapter's name, if its weights changed and not the model's.
    Returns how many engines were told.
    """
    watches = list(_watches.values())
    for watch in watches:
        watch.marked(label, adapter)
    return len(watches)


def worker_made(worker: Any) -> None:
    """A worker was made in this process. A later :meth:`WeightsWatch.start` observes it."""
    _workers.add(worker)


def first_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The first argument of a call; None if it has none."""
    return args[0] if args else next(iter(kwargs.values()), None)


class WeightsWatch:
    """Observes the weights of one engine, and emits :class:`~kvledger.audit.events.WeightsChanged`."""

    def __init__(
        self, scheduler: Any, log: StepLog, step: Callable[[], int], failed: Callable[..., None]
    ) -> None:
        self._scheduler = scheduler
        self._log = log
        self._step = step
        """The number of the last step that the scheduler began."""
        self._failed = failed
        self.versions: dict[str, int] = {}
        """The number of the last change of the model (""), and of each adapter."""
        self._changed_in = -1
        """The step after which the weights last changed."""
        self._asleep = 0
        """The level of the engine's sleep; 0: the weights are there."""
        self._target = ""
        """What ``update_weights`` changes: the model, or the draft model."""
        self._adapters: dict[str, tuple[int, Mapping[str, tuple[int, int]]]] = {}
        """By name of each adapter that was loaded, or that came with a request: its id, and its files."""
        self._calls = 0
        """Calls of the engine core that have not returned."""
        self._loaded = False
        """Whether a model has loaded weights in such a call."""
        self._rpcs: Counter[str] = Counter()
        """How many times all workers were asked for each method or function that may change weights."""
        self._removed: set[str] = set()
        self._models: list[Wrapping] = []
        self._digests: list[WeightDigest] = []
        """The digests of the models in this process, at level ``content``."""
        self._looked_at = -NEVER
        """When the digests last looked at samples."""
        self._looked_in = -1
        self._look_us: float | None = None
        """Microseconds from one look to the next at least; None: no digest is taken."""

    def start(self, *, digests: bool) -> None:
        """Wrap what changes weights. ``digests``: confirm changes by digests, and look for others."""
        if digests:
            from .content.options import options

            self._look_us = options().weights_seconds * 1e6 or NEVER
        core = engine_core()
        if core is not None:
            for name in CORE_METHODS:
                _wrap(core, name)
        _watches[self._scheduler] = self
        config = getattr(self._scheduler, "vllm_config", None)
        for worker in [each for each in _workers if each.vllm_config is config]:
            self.watch_model(worker)

    def remove(self) -> None:
        """Restore what is wrapped, the methods of the class with the last observed engine. Idempotent."""
        for wrapping in self._models:
            wrapping.undo()
        self._models = []
        if _watches.pop(self._scheduler, None) is not None and not _watches:
            for (core, name), covered in _covered.items():
                setattr(core, name, covered)
            _covered.clear()

    def watch_model(self, worker: Any) -> None:
        """Wrap what loads the weights of a worker in this process. ``worker`` may be None."""
        model = getattr(getattr(worker, "model_runner", None), "model", None)
        if model is None or not callable(getattr(model, "load_weights", None)):
            return

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def load_weights(*args: Any, **kwargs: Any) -> Any:
                try:
                    return original(*args, **kwargs)
                finally:
                    self._loaded = True
                    if not self._calls:  # else the call of the engine core is not over
                        with self._guarded("load_weights"):
                            self.changed("load_weights", ev.DECLARED)

            return load_weights

        if self._look_us is not None:
            with self._guarded("the digest of the weights"):
                from .content.weight_digest import WeightDigest

                self._digests.append(WeightDigest(model))
                self.look(self._log.now())
        try:
            self._models.append(Wrapping(model, "load_weights", make))
        except EngineMismatch as mismatch:
            logger.warning("kvledger does not see when weights are loaded: %s", mismatch)

    @contextmanager
    def _guarded(self, hook: str) -> Iterator[None]:
        """What an observer raises never reaches the engine, nor what its report of that raises."""
        try:
            yield
        except Exception as error:
            with suppress(Exception):
                self._failed(hook, error, removed=False)

    def look(self, now: int) -> None:
        """Between two steps, now and then: look whether the weights changed without a call that was seen."""
        if self._look_us is not None and now - self._looked_at >= self._look_us:
            self.look_now()

    def look_now(self) -> None:
        """Look at once, if a step began since the last look: what it computed is then known, or not known."""
        if self._look_us in (None, NEVER) or not self._digests or self._asleep:
            return
        if self._looked_in != self._step():
            self._looked_at, self._looked_in = self._log.now(), self._step()
            with self._guarded("the digest of the weights"):
                looks = [digest.looks_equal() for digest in self._digests]  # each notes what it sees
                self.changed(ev.LOOK, ev.DETECTED, equal=all(looks))

    def _is_equal(self) -> bool | None:
        """Whether all weights are those of the last call, by a digest; None: not known."""
        if self._asleep:
            return None  # the memory of the weights may be unmapped
        found = {digest.is_equal() for digest in self._digests}
        return False if False in found else True if found == {True} else None

    # --- the calls --------------------------------------------------------------------------------------

    def marked(self, label: str, adapter: str) -> None:
        """The caller declares a change."""
        with self._guarded("mark_weights"):
            self.changed("mark_weights", ev.DECLARED, label=label, adapter=adapter)

    def begins(self) -> None:
        """A wrapped method of ``EngineCore`` is called. What changed before it is not its change."""
        self.look_now()
        self._calls, self._loaded = self._calls + 1, False

    def called(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], raised: bool) -> None:
        """A wrapped method of ``EngineCore`` has returned or raised."""
        self._calls -= 1
        with self._guarded(method):
            first = first_argument(args, kwargs)
            if method == "collective_rpc":
                self._rpc(kwargs.get("method", first))
            elif method == ev.ADDS_ADAPTER:
                self._rpcs[method] += 1
                self._adapter_added(kwargs.get("lora_request", first), raised)
            elif method == "remove_lora" and not raised:
                lora_id = kwargs.get("lora_id", first)
                self._removed |= {name for name, (id, _) in self._adapters.items() if id == lora_id}
            elif method == "sleep":
                self._asleep = int(kwargs.get("level", args[0] if args else 1))
            elif method == "wake_up":
                tags = kwargs.get("tags", first)
                if not raised and (tags is None or "weights" in tags):
                    level, self._asleep = self._asleep, 0
                    if level >= DISCARDED_FROM:
                        self.changed("wake_up", ev.DECLARED)
            elif method == "set_weight_version" and not raised:
                self.changed(method, ev.LABELLED, label=str(first))

    def _rpc(self, method: Any) -> None:
        """Workers executed a method of theirs, or a function of the caller."""
        name = method if isinstance(method, str) else getattr(method, "__name__", type(method).__name__)
        if name == "start_weight_update":
            self._target = ""
        elif name == "start_draft_weight_update":
            self._target = DRAFT
        elif not (isinstance(method, str) and name in HARMLESS):
            self._rpcs[name] += 1
            is_known = isinstance(method, str) and name in CHANGING
            kind, adapter = (ev.DECLARED, self._target) if is_known else (ev.POSSIBLE, "")
            kind = ev.DECLARED if self._loaded else kind
            self.changed(name, kind, adapter=adapter, call=self._rpcs[name])
        if name == "finish_weight_update":
            self._target = ""

    def adapter_used(self, request: Any) -> None:
        """A request comes with an adapter, which the engine loads if it has not yet."""
        if request.lora_name not in self._adapters:
            with self._guarded("add_request"):
                files = _files(str(getattr(request, "lora_path", "")))
                self._adapters[str(request.lora_name)] = int(request.lora_int_id), files

    def adapter_runs(self, request: Any) -> None:
        """A request with an adapter is looked up, and is to run in this step.

        The worker loads the adapter before the step if it was removed, and each time if the request says
        "in place". vLLM's server keeps that word for all later requests up to 0.32.
        """
        if self._loads_again(request):
            with self._guarded("the adapter of a request"):
                self._adapter_loaded(LOADS_ADAPTER, request, 0)

    def _adapter_added(self, request: Any, raised: bool) -> None:
        """An adapter was loaded. One of that name that was loaded before may have had other weights.

        ``raised``: at least one worker did not load it. Others may have.
        """
        name, call = str(request.lora_name), self._rpcs[ev.ADDS_ADAPTER]
        if not raised:
            self._adapter_loaded(ev.ADDS_ADAPTER, request, call)
        elif name in self._adapters and self._loads_again(request) and workers(self._scheduler) > 1:
            self.changed(ev.ADDS_ADAPTER, ev.POSSIBLE, adapter=name, call=call)

    def _loads_again(self, request: Any) -> bool:
        """Whether an adapter that was loaded is loaded once more for this request."""
        return request.lora_name in self._removed or bool(getattr(request, "load_inplace", False))

    def _adapter_loaded(self, by: str, request: Any, call: int) -> None:
        """An adapter is loaded from its files or tensors. Weights in memory can't be compared."""
        name, files = str(request.lora_name), _files(str(getattr(request, "lora_path", "")))
        known, again = self._adapters.get(name), self._loads_again(request)
        self._adapters[name] = int(request.lora_int_id), files
        self._removed.discard(name)
        if known is None or not again:
            return
        in_memory = getattr(request, "lora_tensors", None) is not None
        kind = ev.DECLARED if in_memory and call else ev.POSSIBLE
        equal: bool | None = None
        if files and known[1] and not in_memory:
            kind, equal = ev.DECLARED, files == known[1]
        if call or not equal:
            self.changed(by, kind, adapter=name, equal=equal, call=call)

    def changed(
        self,
        by: str,
        kind: str,
        *,
        label: str = "",
        adapter: str = "",
        equal: bool | None = None,
        call: int = 0,
    ) -> None:
        """Emit a change, or a call that may be one. Changes with no step between them have one number."""
        step, version = self._step(), max(self.versions.values(), default=0)
        if equal is None and not adapter and kind in (ev.DECLARED, ev.POSSIBLE):
            equal = self._is_equal()
            kind = ev.DETECTED if equal is False and kind == ev.POSSIBLE else kind
        of = by[:80], kind, label[:80], adapter, equal, call
        event = ev.WeightsChanged(self._log.now(), step, version, *of)
        if event.changes:
            follows = step == self._changed_in and self.versions.get(adapter) == version
            version += not follows
            self._changed_in, self.versions[adapter] = step, version
            event = replace(event, version=version)
        self._log.emit(event)


def _files(path: str) -> dict[str, tuple[int, int]]:
    """Size and time of the last change of each file of an adapter; empty: it is no folder of this host."""
    try:
        return {
            entry.name: (found.st_size, found.st_mtime_ns)
            for entry in os.scandir(Path(path))
            if (found := entry.stat())
        }
    except OSError:
        return {}


def _wrap(core: Any, name: str) -> None:
    """Wrap a method of the class of engine cores, unless it is wrapped or the release has no such method."""
    original = getattr(core, name, None)
    if original is None or (core, name) in _covered:
        return

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        scheduler = getattr(self, "scheduler", None)
        watch = None if scheduler is None else _watches.get(scheduler)
        if watch is None:
            return original(self, *args, **kwargs)
        watch.begins()
        try:
            result = original(self, *args, **kwargs)
        except Exception:
            watch.called(name, args, kwargs, raised=True)
            raise
        watch.called(name, args, kwargs, raised=False)
        return result

    _covered[core, name] = original
    setattr(core, name, method)


# --- Observes in a worker's own process which calls that change weights it makes, and which of them fail.
#
# The engine core of several workers sees that a call failed, and not on which of them; nor does it see what
# a function of the caller does in a worker. The methods are those of the worker and the ``load_weights`` of
# its model; none is part of a step. The journal begins with the first call: a worker whose weights stay has
# none.


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
