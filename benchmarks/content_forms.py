"""How fast each form of the fingerprint reads KV on this CPU, on one thread, and how large the seals are."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from benchmarks.stats import Estimate, estimate

BLOCKS = 64


class Shape(NamedTuple):
    """A KV cache: a name, layers, and the shape of one block in one layer."""

    name: str
    layers: int
    block: tuple[int, int, int]
    dtype: str


SHAPES = (
    Shape("the demo's model, blocks of 32 tokens", 2, (2, 32, 64), "float32"),
    Shape("a model of 8B, blocks of 16 tokens, 4 layers of it", 4, (8, 16, 256), "bfloat16"),
)


def rates(rounds: int) -> Iterator[tuple[str, Estimate]]:
    """Gigabytes a second of each form on each shape."""
    import torch

    from kvledger.audit.engines.content.fingerprint import Fingerprints

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for shape in SHAPES:
            dtype = getattr(torch, shape.dtype)
            layers = [torch.rand(BLOCKS, *shape.block).to(dtype) for _ in range(shape.layers)]
            size = sum(layer.numel() * layer.element_size() for layer in layers)
            prints, blocks = Fingerprints(layers, 1), list(range(0, BLOCKS, 2)) + list(range(1, BLOCKS, 2))
            forms: tuple[tuple[str, Callable[[Any], Any]], ...] = (
                ("NumPy", prints.by_layer),
                ("torch", prints.by_layer_torch),
            )
            for form, call in forms:
                yield (
                    f"{form} form, {shape.name}",
                    estimate([_rate(call, blocks, size) for _ in range(rounds)]),
                )
    finally:
        torch.set_num_threads(threads)


def _rate(call: Callable[[Any], Any], blocks: list[int], size: int) -> float:
    """Gigabytes a second of repeated calls, for at least 50 ms."""
    call(blocks)
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < 0.05:
        call(blocks)
        calls += 1
    return size * calls / (time.perf_counter() - began) / 1e9


def seal_bytes(blocks: int = 100_000) -> float:
    """Bytes of the seals of one block: its fingerprint on the device, and what the worker keeps of it."""
    import torch

    from kvledger.audit.engines.content.seals import Seals

    group = SimpleNamespace(layers=[torch.zeros(blocks, 1)])
    seals: Seals[int] = Seals(SimpleNamespace(blocks=blocks, groups={0: group}), 1, seen_from_start=True)
    for step, first in enumerate(range(0, blocks, 1000), 1000):
        seals.seal(0, range(first, first + 1000), step)
    lists = (seals.steps, seals.intact, seals.group_of)
    numbers = {id(number): sys.getsizeof(number) for kept in lists for number in kept}
    held = seals.values.values
    values = held.numel() * held.element_size()
    return float(values + sum(map(sys.getsizeof, lists)) + sum(numbers.values())) / blocks
