"""A model runner with KV caches and no model, for the driver of the real scheduler.

Each position that a step executes gets other random numbers than it had before, as two computations of one
prefix differ; so does the state that a step leaves. The runner keeps its own block tables. A step is executed
when its output is delivered: by then the rejections of the step before are known, which an asynchronous
scheduler had to ignore.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvledger.audit.engines.content.attached import watch_content
from kvledger.audit.entry.attach import LiveAudit, attach
from kvledger.audit.traffic.driver import Driver

HEADS, WIDTH, LAYERS = 2, 4, 2


class KVRunner:
    """The part of vLLM's model runner that level ``content`` reads, and writes of random KV."""

    def __init__(self, scheduler: Any) -> None:
        import torch

        manager = scheduler.kv_cache_manager
        blocks = manager.block_pool.num_gpu_blocks
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=0),
            scheduler_config=scheduler.vllm_config.scheduler_config,
            compilation_config=SimpleNamespace(static_forward_context={}),
            cache_config=scheduler.vllm_config.cache_config,
        )
        self.kv_cache_config = SimpleNamespace(
            num_blocks=blocks,
            kv_cache_groups=list(scheduler.kv_cache_config.kv_cache_groups),
            kv_cache_tensors=[],
        )
        self.caches: dict[int, list[Any]] = {}
        """By group: one tensor a layer, of blocks, heads, tokens and content; or one for each state."""
        self.sizes: list[int] = []
        """Tokens of a block, by group."""
        self.on_execute: Callable[[Any], None] | None = None
        """Called in each step, between the writes of loads and the forward pass."""
        self.load_errors: set[int] = set()
        """Blocks that the connector's worker side reports as not loaded in this step, and does not write."""
        self.accepted: dict[str, list[int]] = {}
        """The drafts that each request accepts in the present step."""
        self._random = torch.Generator().manual_seed(0)
        self._torch = torch
        self._tables: dict[str, list[list[int]]] = {}
        self._computed: dict[str, int] = {}
        self._rejected: dict[str, int] = {}
        self._local: dict[str, int] = {}
        if scheduler.connector is not None:
            self.note_local_hits(scheduler.connector)
        for number, group in enumerate(self.kv_cache_config.kv_cache_groups):
            spec = group.kv_cache_spec
            self.sizes.append(spec.block_size)
            if self.has_states(spec):
                self.caches[number] = [
                    torch.zeros((blocks, *shape), dtype=dtype)
                    for _ in range(LAYERS)
                    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
                ]
            else:
                shape = blocks, HEADS, spec.block_size, 2 * WIDTH
                self.caches[number] = [torch.zeros(shape) for _ in range(LAYERS)]
            self._bind(number, group)

    @staticmethod
    def has_states(spec: Any) -> bool:
        """Whether a block of a group has a state."""
        return hasattr(spec, "shapes")

    def note_local_hits(self, connector: Any) -> None:
        """Note how many tokens are local hits whenever the connector is asked for external ones."""
        answer = connector.get_num_new_matched_tokens

        def noted(request: Any, num_computed_tokens: int) -> Any:
            self._local[request.request_id] = num_computed_tokens
            return answer(request, num_computed_tokens)

        connector.get_num_new_matched_tokens = noted

    def _bind(self, number: int, group: Any) -> None:
        names = [f"layers.{layer}.group.{number}" for layer in range(LAYERS)]
        self.kv_cache_config.kv_cache_groups[number] = SimpleNamespace(
            layer_names=names, kv_cache_spec=group.kv_cache_spec
        )
        if self.has_states(group.kv_cache_spec):
            each = len(self.caches[number]) // LAYERS
            for layer, name in enumerate(names):
                states = self.caches[number][layer * each : (layer + 1) * each]
                context = SimpleNamespace(kv_cache=states)
                self.vllm_config.compilation_config.static_forward_context[name] = context
            return
        for name, cache in zip(names, self.caches[number], strict=True):
            stride = cache.stride(0) * cache.element_size()
            self.kv_cache_config.kv_cache_tensors.append(SimpleNamespace(layers=[name], block_stride=stride))
            self.vllm_config.compilation_config.static_forward_context[name] = SimpleNamespace(kv_cache=cache)

    def execute_model(self, scheduler_output: Any) -> str:
        """Write what a real runner would write in this step."""
        output = scheduler_output
        for request_id in output.finished_req_ids:
            self._tables.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, blocks, computed in rows:
            if request_id in cached.resumed_req_ids:
                self._begin(request_id, blocks, computed)
            else:
                self._computed[request_id] = computed - self._rejected.pop(request_id, 0)
                for table, more in zip(self._tables[request_id], blocks or (), strict=bool(blocks)):
                    table += more
        for source, target in getattr(output, "kv_cache_block_copies", None) or ():
            for layers in self.caches.values():
                for layer in layers:
                    layer[target] = layer[source]
        self.fill_loads(output)
        if self.on_execute is not None:
            self.on_execute(output)
        self.get_block_ids_with_load_errors()
        for request_id, tokens in output.num_scheduled_tokens.items():
            start = self._computed[request_id]
            for group, table in enumerate(self._tables[request_id]):
                self.compute(request_id, group, table, start, start + tokens)
        return "output"

    def fill_loads(self, output: Any) -> None:
        """Write what the scripted connector's metadata orders to be loaded."""
        for load in getattr(output.kv_connector_metadata, "loads", ()):
            for group, blocks in enumerate(load.block_ids):
                self.load(load.request_id, group, blocks, load.external_tokens)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The method of a connector's worker side that vLLM's runner calls in each step."""
        return self.load_errors

    def rejected(self, request_id: str, tokens: int) -> None:
        """Drafts of a request's last executed step were rejected."""
        self._rejected[request_id] = tokens

    def fill(self, group: int, blocks: list[int]) -> None:
        """Write whole blocks, as a load does."""
        for layer in self.caches[group]:
            for block in blocks if not self.load_errors else set(blocks) - self.load_errors:
                layer[block] = self._torch.rand(layer[block].shape, generator=self._random)

    def load(self, request_id: str, group: int, blocks: Any, tokens: int) -> None:
        """Write the blocks in which ``tokens`` external tokens of a request lie, after its local hits."""
        size, local = self.sizes[group], self._local[request_id]
        self.fill(group, [block for block in blocks[local // size : -(-(local + tokens) // size)] if block])

    def _begin(self, request_id: str, blocks: Any, computed: int) -> None:
        self._tables[request_id] = [list(table) for table in blocks]
        self._computed[request_id] = computed
        self._rejected.pop(request_id, None)

    def compute(self, request_id: str, group: int, table: list[int], start: int, end: int) -> None:
        """Write the positions that a step executes for a request, or the state that it leaves."""
        size = self.sizes[group]
        if self.has_states(self.kv_cache_config.kv_cache_groups[group].kv_cache_spec):
            self.fill(group, [table[(end - 1) // size]])
            return
        for layer in self.caches[group]:
            for index in range(start // size, min(len(table), -(-end // size))):
                first, last = max(start - index * size, 0), min(end - index * size, size)
                shape = layer[table[index], :, first:last].shape
                layer[table[index], :, first:last] = self._torch.rand(shape, generator=self._random)


class DriverWithCaches(Driver):
    """A driver whose steps are executed by a :class:`KVRunner`, as soon as one is attached."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.scheduler.kv_runner = None
        answer = self.runner.answer

        def execute(step: Any, requests: Any, accepted: Any) -> Any:
            kv_runner = self.scheduler.kv_runner
            result = answer(step, requests, accepted)
            if kv_runner is not None:
                sampled = dict(zip(result.req_ids, result.sampled_token_ids, strict=False))
                kv_runner.accepted = {
                    name: sampled[name] if self.setup.canvas else sampled[name][:-1]
                    for name in step.scheduled.scheduled_spec_decode_tokens
                }
                kv_runner.execute_model(step.scheduled)
            if kv_runner is not None and self.setup.asynchronous:
                sampled = dict(zip(result.req_ids, result.sampled_token_ids, strict=False))
                for name, drafts in step.scheduled.scheduled_spec_decode_tokens.items():
                    kv_runner.rejected(name, len(drafts) - max(0, len(sampled[name]) - 1))
            return result

        self.runner.answer = execute  # type: ignore[method-assign]


def attach_content(
    scheduler: Any, stride: int = 0, runner_type: Callable[[Any], KVRunner] = KVRunner
) -> LiveAudit:
    """Audit a scheduler at level ``content``, with a KV runner of its own.

    ``stride``: what the runner declares as the distance of two blocks, in place of the true one.
    """
    scheduler.kv_runner = runner_type(scheduler)
    for declared in scheduler.kv_runner.kv_cache_config.kv_cache_tensors if stride else ():
        declared.block_stride = stride
    audit = attach(scheduler, level="blocks")
    observer, runner = audit._observer, scheduler.kv_runner
    observer.content = watch_content(observer, SimpleNamespace(model_runner=runner), runner)
    if observer.content is not None:
        observer.content.begin_segment()
    return audit
