"""vLLM's SimpleCPUOffloadConnector, both sides, on a device that runs behind its host.

The scheduler, the connector and its copy thread's loop are vLLM's own. The device is a model of one: what a
step writes is there for later work of the same stream, and for a copy on another stream only once the step's
output was delivered, or if the copy waits for an event that was recorded after the step. A copy runs when it
is launched. Up to vLLM 0.23 the copies of stores wait for no event (vLLM#45704).
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from tests.scenarios.driving import Attach, engine_setup
from tests.scenarios.kv_runner import HEADS, LAYERS, WIDTH, KVRunner

from kvledger.audit.engines.content.attached import watch_content
from kvledger.audit.entry.attach import attach as attach_audit
from kvledger.audit.traffic import engine_setup as built_by
from kvledger.audit.traffic.driver import Driver

BLOCKS, BLOCK_TOKENS = 24, 16
PAGE_BYTES = HEADS * BLOCK_TOKENS * 2 * WIDTH * 4
NAMES = [f"layers.{layer}.group.0" for layer in range(LAYERS)]


class Device:
    """The memory of the KV caches as streams see it. ``states[n]``: after the first n steps."""

    def __init__(self, caches: list[Any]) -> None:
        self._caches = caches
        self._states = {0: self._copies()}
        self.launched, self.retired, self.loads = 0, 0, 0

    def _copies(self) -> list[Any]:
        return [cache.clone() for cache in self._caches]

    def launch(self) -> None:
        """A step was launched, and its writes follow those of the steps before."""
        self.launched += 1
        self._states[self.launched] = self._copies()

    def retire(self) -> None:
        """The output of the oldest step was delivered."""
        del self._states[self.retired]
        self.retired += 1

    def seen(self, layer: int, waited: int) -> Any:
        """What a copy sees of a layer. ``waited``: the steps that its stream has waited for."""
        return self._states[max(self.retired, waited)][layer]

    def loaded(self, layer: int, block: int) -> None:
        """A load has filled a block of a layer, in which no step writes meanwhile."""
        self.loads += 1
        for state in self._states.values():
            state[layer][block] = self._caches[layer][block]


class Stream:
    """A ``torch.cuda.Stream``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.waited = 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -1

    def wait_event(self, event: Any) -> None:
        """Later work of this stream follows what the event was recorded after."""
        self.waited = max(self.waited, event.after)


class Params(NamedTuple):
    """Source and target of copies, and the stream that runs them."""

    source: dict[str, Any]
    target: dict[str, Any]
    stream: Stream


class Inline:
    """A queue whose items the loop of the copy thread takes at once, and the thread itself."""

    def __init__(
        self, target: Callable[..., None] | None = None, args: Any = (), daemon: bool = True
    ) -> None:
        self._items: deque[Any] = deque()
        self._loop: Callable[[], None] | None = None
        if target is not None:
            queue, *rest = args
            queue._loop = lambda: target(queue, *rest)

    def start(self) -> None: ...

    def put(self, item: Any) -> None:
        if self._loop is not None:
            self._items.extend((item, None))  # None ends the loop
            self._loop()

    def get(self) -> Any:
        return self._items.popleft()


class OffloadRunner(KVRunner):
    """A runner that calls the connector's worker side as vLLM's model runner does."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        self.device = Device(self.caches[0])
        self.worker_side = KVConnectorFactory.create_connector(
            scheduler.vllm_config, KVConnectorRole.WORKER, scheduler.kv_cache_config
        )
        self.worker_side.register_kv_caches(dict(zip(NAMES, self.caches[0], strict=True)))
        self.reports: deque[tuple[Any, Any]] = deque()
        """What the worker side has reported in each step: received requests, and its metadata."""

    def note_local_hits(self, connector: Any) -> None:
        """Loads are the connector's."""

    def fill_loads(self, output: Any) -> None:
        """Loads are the connector's."""

    def execute_model(self, scheduler_output: Any) -> str:
        connector, metadata = self.worker_side, scheduler_output.kv_connector_metadata
        if inspect.signature(connector.handle_preemptions).parameters.keys() == {"kv_connector_metadata"}:
            connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        connector.start_load_kv(SimpleNamespace())
        super().execute_model(scheduler_output)
        self.device.launch()
        connector.wait_for_save()
        _, received = connector.get_finished(set(scheduler_output.finished_req_ids))
        self.reports.append((received, connector.build_connector_worker_meta()))
        connector.clear_connector_metadata()
        return "output"


class OffloadDriver(Driver):
    """Launches each step when it is scheduled, as a worker does whose device runs behind."""

    kv: OffloadRunner

    def schedule(self) -> Any:
        scheduled = super().schedule()
        self.kv.execute_model(scheduled)
        return scheduled

    def output(self, **options: Any) -> Any:
        self.runner.transfer = self._report  # type: ignore[method-assign]
        return super().output(accepted=options.get("accepted"))

    def _report(self, step: Any, report: Any, held: Any, answer: Any) -> None:
        from vllm.v1.outputs import KVConnectorOutput

        self.kv.device.retire()
        received, metadata = self.kv.reports.popleft()
        answer.kv_connector_output = KVConnectorOutput(
            finished_recving=received or None, kv_connector_worker_meta=metadata
        )


@contextmanager
def late_device(runner: list[OffloadRunner]) -> Iterator[None]:
    """Put the model of a device in the place of CUDA's streams, events and copies."""
    import torch
    from vllm.v1.simple_kv_offload import copy_backend

    def record(event: Any, stream: Any = None) -> None:
        event.after = runner[0].device.launched

    event = type("Event", (), {"record": record, "query": lambda _: True, "synchronize": lambda _: None})

    def copy(sources: list[int], targets: list[int], params: Params) -> None:
        caches, device = runner[0].caches[0], runner[0].device
        places = [cache.data_ptr() for cache in caches]
        for source, target in zip(params.source.values(), params.target.values(), strict=True):
            stores = source.data_ptr() in places
            layer = places.index((source if stores else target).data_ptr())
            if stores:
                seen = device.seen(layer, params.stream.waited)
                source = seen.view(torch.int8).view(len(seen), -1)
            for number, block in zip(sources, targets, strict=True):
                target[block] = source[number]
                if not stores:
                    device.loaded(layer, block)

    with ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "Stream", Stream),
            (torch, "Event", event),
            (torch.cuda, "current_stream", lambda *_: Stream()),
            (copy_backend, "queue", SimpleNamespace(SimpleQueue=Inline)),
            (copy_backend, "threading", SimpleNamespace(Thread=Inline)),
            (
                copy_backend,
                "build_params",
                lambda source, target, stream, **_: Params(source, target, stream),
            ),
            (copy_backend, "copy_blocks", copy),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _with_tensors(build: Callable[..., Any]) -> Callable[..., Any]:
    """The KV cache configuration, with the tensors that the connector reads its sizes from."""

    def built(setup: Any) -> Any:
        from vllm.v1.kv_cache_interface import KVCacheTensor

        config, size = build(setup), BLOCKS * PAGE_BYTES
        if "shared_by" in inspect.signature(KVCacheTensor).parameters:
            tensors = [KVCacheTensor(size=size, shared_by=[name]) for name in NAMES]
        else:
            placed = {"layer_stride": size, "block_stride": PAGE_BYTES}
            tensors = [KVCacheTensor(size=size, layers=[name], **placed) for name in NAMES]
        config.kv_cache_tensors = tensors
        return config

    return built


def offloaded(attach: Attach, *, asynchronous: bool, output: int = 20, shared: int = 200) -> None:
    """Three requests: the second takes the blocks of the first, and the third loads them from host memory.

    ``output``: the most tokens of each output. ``shared``: how many tokens the third shares with the first.
    """
    setup = engine_setup(
        blocks=BLOCKS,
        block_size=BLOCK_TOKENS,
        max_batched_tokens=64,
        asynchronous=asynchronous,
        connector="SimpleCPUOffloadConnector",
        connector_options=(("cpu_bytes_to_use", 4 * BLOCKS * LAYERS * PAGE_BYTES),),
    )
    runners: list[OffloadRunner] = []
    with mock.patch.object(built_by, "_kv_cache_config", _with_tensors(built_by._kv_cache_config)):
        driver = OffloadDriver(setup)
    with late_device(runners):
        runners.append(OffloadRunner(driver.scheduler))
        driver.kv = driver.scheduler.kv_runner = runners[0]
        attach(driver.scheduler)
        for name, shares in (("first", None), ("second", None), ("third", ("first", shared))):
            driver.add(name, 210, output, shares=shares)
            driver.run()
        if not runners[0].device.loads:
            raise RuntimeError("no block was loaded")


def attach_with_connector(scheduler: Any) -> Any:
    """Audit a scheduler at level ``content``, with the connector's worker side that its runner has."""
    audit = attach_audit(scheduler, level="blocks")
    observer, runner = audit._observer, scheduler.kv_runner
    observer.content = watch_content(observer, SimpleNamespace(model_runner=runner), runner.worker_side)
    if observer.content is not None:
        observer.content.begin_segment()
    return audit
