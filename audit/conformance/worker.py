"""The worker side of a real connector over a KV cache whose contents are known.

Where a model would write keys and values, the worker writes a checksum of the sequence up to each token,
another one for the key, for the value and for each layer. Only the right tokens at the right position give
these numbers, so the cache shows whether a load brought the right KV, and each part of it to its place. The
worker side is called as vLLM's model runner calls it, on the CPU, in this process.

Needs vLLM 0.30 or later, whose cache layers are [blocks, heads, tokens of a block, elements].
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock
from zlib import crc32

from ..events import Event
from ..traffic import engine_setup
from ..traffic.driver import Accepted, Driver, EngineSetup, ModelStep, Observation

ELEMENTS = 2
"""Numbers per token and layer: a key and a value, of one head of size 1."""
IDLE_SECONDS = 0.005
EXACT = 1 << 24
"""A float of 32 bits holds every whole number below this one exactly."""


@dataclass(frozen=True)
class WrongKV:
    """A request began to run over KV that does not belong to its tokens, from ``position`` up."""

    request_id: str
    position: int
    tokens: int
    part: str = ""
    """What is wrong with it, if not all of it is."""

    def sentence(self, promised: int) -> str:
        """The sentence on the score card; ``promised``: external tokens of the request, 0 if not known."""
        loaded = promised - self.tokens
        figures = f"promised {promised:,}, loaded {loaded:,}; " if promised and loaded >= 0 else ""
        return (
            f"Request {self.request_id}: {figures}it ran over {self.tokens} tokens of KV that is not its "
            f"own, from position {self.position} up{f': {self.part}' if self.part else ''}."
        )


@dataclass
class Worker:
    """One worker: its KV cache, the connector's worker side, and the block tables of running requests."""

    connector: Any
    layers: dict[str, Any]
    """The KV cache: a tensor per layer."""
    block_size: int
    blocks: dict[str, list[int]] = field(default_factory=dict)
    """Block table by request id, after the last scheduled step."""
    tables: deque[dict[str, list[int]]] = field(default_factory=deque)
    """The block tables of each step in flight, the oldest first: a request may have others since."""
    sequences: dict[str, Any] = field(default_factory=dict)
    """vLLM's Request by request id."""
    wrong_kv: list[WrongKV] = field(default_factory=list)
    """Admissions over KV that does not belong to the request."""
    served: int = 0
    """Tokens that already had the right KV in the cache when their request was admitted or resumed."""

    @classmethod
    def of(cls, scheduler: Any) -> Worker:
        """The worker side of a scheduler's connector, with a cache of the configured layout."""
        import torch
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        _join_groups()
        config, layout = scheduler.vllm_config, scheduler.kv_cache_config
        size = int(config.cache_config.block_size)
        names = [name for group in layout.kv_cache_groups for name in group.layer_names]
        layers = {name: torch.zeros(layout.num_blocks, 1, size, ELEMENTS) for name in names}
        config.compilation_config.static_forward_context.update(
            {name: SimpleNamespace(kv_cache=tensor) for name, tensor in layers.items()}
        )
        connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, layout)
        connector.register_kv_caches(layers)
        return cls(connector, layers, size)

    def scheduled(self, step: ModelStep, requests: Any) -> None:
        """Update the block tables from a step; call it as soon as the step is scheduled."""
        for new in step.scheduled.scheduled_new_reqs:
            self.blocks[new.req_id] = list(new.block_ids[0])
            self.sequences[new.req_id] = requests[new.req_id]
        cached = step.scheduled.scheduled_cached_reqs
        resumed = set(step.scheduled.scheduled_cached_reqs.resumed_req_ids)
        for name, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            ids = list(more[0]) if more else []
            self.blocks[name] = ids if name in resumed else [*self.blocks[name], *ids]
        self.tables.append({name: self.blocks[name] for name in step.scheduled.num_scheduled_tokens})

    def run(self, step: ModelStep, broken: frozenset[int]) -> dict[str, Any]:
        """Execute a step; returns the fields of vLLM's KVConnectorOutput. ``broken``: blocks never loaded."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

        connector: KVConnectorBase_V1 = self.connector
        connector.handle_preemptions(step.scheduled.kv_connector_metadata)
        connector.bind_connector_metadata(step.scheduled.kv_connector_metadata)
        context: Any = SimpleNamespace(
            attn_metadata=dict.fromkeys(self.layers, None),
            no_compile_layers={name: SimpleNamespace(kv_cache=kv) for name, kv in self.layers.items()},
        )
        load_first = getattr(step.scheduled, "has_sync_kv_loads", True)
        if load_first:
            connector.start_load_kv(context)
        for name in self.layers:
            connector.wait_for_layer_load(name)
        for block in broken:
            for layer in self.layers.values():
                layer[block] = -1
        self._execute(step, broken)
        self.tables.popleft()
        for name, layer in self.layers.items():
            connector.save_kv_layer(name, layer, None)
        if not load_first:
            connector.start_load_kv(context)
        connector.wait_for_save()
        results = connector.get_transfer_results(step.scheduled.finished_req_ids)
        invalid = set(connector.get_block_ids_with_load_errors()) | broken
        reported = {
            "finished_sending": results.finished_sending,
            "finished_recving": results.finished_recving,
            "failed_recving": results.failed_recving,
            "invalid_block_ids": invalid,
            "kv_connector_worker_meta": connector.build_connector_worker_meta(),
        }
        connector.clear_connector_metadata()
        return reported

    def _execute(self, step: ModelStep, broken: frozenset[int]) -> None:
        """Check the KV under each admitted request, then write the checksums of the scheduled tokens."""
        starts, tables = _starts(step), self.tables[0]
        for name, count in step.scheduled.num_scheduled_tokens.items():
            start = starts[name]
            sums = _checksums(list(self.sequences[name].all_token_ids)[: start + count])
            if name in step.admitted and not broken.intersection(tables[name]):
                self._check(name, sums[:start])
            for position, value in enumerate(sums[start:], start):
                block, offset = tables[name][position // self.block_size], position % self.block_size
                for number, layer in enumerate(self.layers.values()):
                    layer[block, :, offset] = layer.new_tensor(_content(value, number))

    def _check(self, name: str, expected: list[int]) -> None:
        wrong = [p for p, value in enumerate(expected) if not self._holds(name, p, value)]
        if wrong:
            part = self._wrong_part(name, wrong[0], expected[wrong[0]])
            self.wrong_kv.append(WrongKV(name, wrong[0], len(wrong), part))
        self.served += len(expected) - len(wrong)

    def _found(self, name: str, position: int) -> list[list[float]]:
        """Key and value in each layer, as they stand in the cache."""
        block, offset = self.tables[0][name][position // self.block_size], position % self.block_size
        return [layer[block, 0, offset].tolist() for layer in self.layers.values()]

    def _holds(self, name: str, position: int, value: int) -> bool:
        return self._found(name, position) == [_content(value, number) for number in range(len(self.layers))]

    def _wrong_part(self, name: str, position: int, value: int) -> str:
        """Which part of a token's KV is wrong; "" for all of it."""
        found = self._found(name, position)
        expected = [_content(value, number) for number in range(len(found))]
        wrong = [number for number, kv in enumerate(found) if kv != expected[number]]
        if all(found[number] == expected[number][::-1] for number in wrong):
            return "keys and values are exchanged"
        if len(wrong) < len(found):
            return f"layer {', '.join(map(str, wrong))} of {len(found)}"
        sides = {side for number in wrong for side in (0, 1) if found[number][side] != expected[number][side]}
        return "" if len(sides) == 2 else f"the {('keys', 'values')[sides.pop()]}"


def _join_groups() -> None:
    """Join process groups of one process: vLLM's worker joins its groups before it makes a connector."""
    import torch.distributed
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        return
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, local_rank=0, backend="gloo")
        parallel_state.initialize_model_parallel()


def _starts(step: ModelStep) -> dict[str, int]:
    """The first position that a step executes, by request."""
    scheduled = step.scheduled
    cached = scheduled.scheduled_cached_reqs
    starts = {new.req_id: int(new.num_computed_tokens) for new in scheduled.scheduled_new_reqs}
    return starts | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))


def _checksums(token_ids: list[int]) -> list[int]:
    sums, last = [], 0
    for token in token_ids:
        last = crc32(token.to_bytes(4, "little"), last)
        sums.append(last % EXACT)
    return sums


def _content(value: int, layer: int) -> list[float]:
    """Key and value of a token in one layer."""
    return [float((value + 2 * layer + side) % EXACT) for side in range(ELEMENTS)]


class DriverWithWorker(Driver):
    """A driver whose steps run through a connector's worker side."""

    def __init__(self, setup: EngineSetup | None = None, *, salt: str = "", **how: Any) -> None:
        """``salt``: the same request names give other tokens under another salt."""
        super().__init__(setup, **how)
        self.salt = salt
        self.worker = Worker.of(self.scheduler)
        """The connector's worker side, and a KV cache with known contents."""
        offered = self.worker.connector.get_handshake_metadata()
        if offered is not None:  # this is the only worker
            self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): offered})
        self.breaks: dict[str, int] = {}
        """By request id: in its next load, the blocks of its table from this index on never arrive."""

    def schedule(self) -> Any:
        scheduled = super().schedule()
        self.worker.scheduled(self.in_flight[-1], self.scheduler.requests)
        return scheduled

    def prompt(
        self, request_id: str, prompt_tokens: int | Sequence[int], shares: tuple[str, int] | None
    ) -> list[int]:
        """As for any driver; a request's own tokens form a family too, so that others can share them."""
        if isinstance(prompt_tokens, int):
            family, shared = shares or (request_id, prompt_tokens)
            shares = f"{family} {self.salt}", shared
        return super().prompt(request_id, prompt_tokens, shares)

    def preempt(self, request_id: str, *, drop: bool | None = None) -> None:
        """Preempt as for lack of blocks, and schedule the step in which the request can't run again."""
        super().preempt(request_id, drop=drop)
        manager = self.scheduler.kv_cache_manager
        allocate_slots = manager.allocate_slots

        def allocate(request: Any, *args: Any, **how: Any) -> Any:
            return None if request.request_id == request_id else allocate_slots(request, *args, **how)

        with mock.patch.object(manager, "allocate_slots", allocate):
            self.schedule()

    def output(self, *, accepted: Accepted = None, **_: Any) -> dict[int, Any]:
        """Deliver the oldest step's output, with what the connector's worker side reports of it."""
        from vllm.v1.outputs import KVConnectorOutput

        step = self.in_flight.popleft()
        if not step.scheduled.num_scheduled_tokens:
            time.sleep(IDLE_SECONDS)  # a store in another process answers in its own time
        reported = self.worker.run(step, self._broken(step))
        answer = self.runner.answer(step, self.scheduler.requests, accepted)
        answer.kv_connector_output = KVConnectorOutput(**reported)
        outputs: dict[int, Any] = engine_setup.take_output(self.scheduler, step.scheduled, answer, None)
        for of_client in outputs.values():
            for output in of_client.outputs:
                self.delivered.setdefault(output.request_id, []).append(output)
        return outputs

    def _broken(self, step: ModelStep) -> frozenset[int]:
        """Blocks that :attr:`breaks` drops: of a synchronous load in this step or of an asynchronous one."""
        broken: set[int] = set()
        for name in list(self.breaks):
            request = self.scheduler.requests.get(name)
            if request is not None and request.status.name == "WAITING_FOR_REMOTE_KVS":
                end = int(request.num_computed_tokens)
            elif name in step.admitted:
                end = _starts(step)[name]
            else:
                continue
            last = -(-end // self.setup.block_size)
            broken.update(self.blocks(name)[self.breaks.pop(name) : last])
        return frozenset(broken)

    def run(self, max_steps: int = 3_000) -> None:
        """Step until nothing is left to do."""
        super().run(max_steps)


# --- The engines of one situation, each under observation.


class ObservedEngines:
    """Starts and stops the engines of one situation and keeps what was observed of each.

    ``salt`` makes the tokens of this situation differ from those of any other. ``disaggregated``: every
    engine reads from one more, which prefills for it.
    """

    def __init__(self, salt: str = "", disaggregated: bool = False) -> None:
        self.salt = salt
        self.drivers: list[Any] = []
        """One driver per engine, in the order of their start."""
        self.observed: list[Observation] = []
        """What was observed of each engine, in the same order."""
        self.events: list[list[Event]] = []
        """The events of each, once observation has stopped."""
        self.prefiller: Any = None
        """The driver of the engine that all others read from, where ``disaggregated``."""
        self._disaggregated = disaggregated
        """Whether every engine reads from one more."""

    def start(self, **setup: Any) -> Any:
        """Start an engine; returns its driver. A second engine finds what the first one saved."""
        from ..traffic.driver import EngineSetup

        if not self._disaggregated:
            return self._observe(DriverWithWorker(EngineSetup(**setup), salt=self.salt))
        if self.prefiller is None:
            self.prefiller = self._observe(prefilling(setup, self.salt))
        return self._observe(decoding(setup, self.salt, self.prefiller))

    def stop(self) -> None:
        """Stop observing, and shut the connectors of disaggregated engines down."""

        self.events = [observation.stop() for observation in self.observed]
        for driver in self.drivers if self._disaggregated else ():
            shut_down(driver)

    def _observe(self, driver: Any) -> Any:
        from ..engines.v1_since_0_27 import V1Observer

        observation = Observation()
        observation(driver.scheduler)
        (observer,) = observation.observers
        assert isinstance(observer, V1Observer)
        observer.watch_worker(driver.worker.connector)
        self.drivers.append(driver)
        self.observed.append(observation)
        return driver


# --- Two engines of one connector: one prefills prompts, the other loads their KV and decodes.
#
# Some connectors have no store, only engines. The driver takes the place of a router: a prompt that shares
# a prefix with an earlier request goes to the prefilling engine first, for one token, and then, with the
# ``kv_transfer_params`` which that engine returned, to the decoding one. Both engines are in this process,
# each with a worker and a KV cache; the connector moves the KV between them.

BLOCK_SIZE = 32
"""Transfers use the blocks of the attention backend; the CPU backend needs a multiple of 32 tokens."""
PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
"""The environment variable with an engine's port; engines on one machine need different ports."""
MAX_WAIT_STEPS = 400
"""Steps to wait for a prompt to be prefilled."""
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def prefilling(setup: dict[str, Any], salt: str) -> DriverWithWorker:
    """An engine that prefills and keeps the blocks until they were read."""
    with _free_port():
        return DriverWithWorker(_setup_of("kv_producer", setup), salt=salt)


def decoding(setup: dict[str, Any], salt: str, prefiller: DriverWithWorker) -> DecodingDriver:
    """An engine that loads what ``prefiller`` has prefilled."""
    with _free_port():
        return DecodingDriver(_setup_of("kv_consumer", setup), salt=salt, prefiller=prefiller)


def shut_down(driver: DriverWithWorker) -> None:
    """Shut an engine's connector down, so that it frees its ports and threads."""
    driver.worker.connector.shutdown()
    driver.connector.shutdown()


class DecodingDriver(DriverWithWorker):
    """The decoding engine, which a situation drives; the prefilling engine steps with it."""

    def __init__(self, setup: EngineSetup, *, salt: str, prefiller: DriverWithWorker) -> None:
        super().__init__(setup, salt=salt)
        self.prefiller = prefiller
        """Drives the engine that prefills."""

    def add(
        self,
        request_id: str,
        prompt_tokens: int | Sequence[int],
        max_tokens: int = 16,
        *,
        shares: tuple[str, int] | None = None,
        **how: Any,
    ) -> Any:
        """As for any driver; the other engine prefills the whole prompt of a request that shares a prefix."""
        prompt = self.prompt(request_id, prompt_tokens, shares)
        if shares:
            how["transfer"] = self._prefilled(f"{request_id} #{self._added}", prompt)
        return super().add(request_id, prompt, max_tokens, **how)

    def _prefilled(self, request_id: str, prompt: list[int]) -> dict[str, Any] | None:
        """Have the other engine prefill a prompt; returns the ``kv_transfer_params`` of its blocks."""
        self.prefiller.add(request_id, prompt, 1, transfer=TO_PREFILL)
        for _ in range(MAX_WAIT_STEPS):
            self.prefiller.step()
            for output in self.prefiller.delivered.get(request_id, ()):
                if output.finish_reason is not None:
                    transfer: dict[str, Any] | None = output.kv_transfer_params
                    return transfer
        raise RuntimeError(f"{request_id} was not prefilled in {MAX_WAIT_STEPS} steps")

    def step(self, **of_output: Any) -> dict[int, Any]:
        outputs = super().step(**of_output)
        self.prefiller.step()
        return outputs

    def run(self, max_steps: int = 3_000) -> None:
        """Step until neither engine has anything left to do."""
        super().run(max_steps)
        self.prefiller.run(max_steps)


def _setup_of(role: str, setup: dict[str, Any]) -> EngineSetup:
    return EngineSetup(**{"block_size": BLOCK_SIZE, **setup, "kv_role": role})


def _free_port() -> Any:
    """Set :data:`PORT` to a free port within the context."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return mock.patch.dict(os.environ, {PORT: str(free.getsockname()[1])})
