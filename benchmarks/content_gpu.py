"""Times the fingerprint kernel on a GPU against a device-to-device copy of the same bytes.

    python benchmarks/content_gpu.py [--quick]
    python benchmarks/content_gpu.py --check   # without a GPU: interpret the kernel, compile it for sm_90

A copy reads and writes each byte, the kernel only reads it. *bandwidth* is the bytes that a call moves over
memory per second, so the kernel reaches 100 % of the copy when it takes half of the copy's time.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

BLOCK_TOKENS = (16, 32, 64, 128, 256)
LAYERS = (32, 80)
DTYPES = ("bfloat16", "float8_e4m3fn")
DUE = (1, 16, 256, 4096)
HEADS, HEAD_DIM = 8, 128
POOL_BYTES = 20 << 30
"""The most memory of one case's blocks; the copy needs it twice more. A larger case is left out."""

REPEATS = 20


class Case(NamedTuple):
    """One shape of a KV cache, and how many of its blocks are fingerprinted."""

    block_tokens: int
    layers: int
    dtype: str
    due: int

    @property
    def layer_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.block_tokens * HEADS * 2 * HEAD_DIM * (2 if self.dtype == "bfloat16" else 1)

    @property
    def bytes(self) -> int:
        """Bytes of all due blocks."""
        return self.layer_bytes * self.layers * self.due


def cases(quick: bool) -> Iterator[Case]:
    """The cases whose blocks fit."""
    for block_tokens, layers, dtype, due in itertools.product(
        (16,) if quick else BLOCK_TOKENS, LAYERS[:1] if quick else LAYERS, DTYPES, DUE
    ):
        case = Case(block_tokens, layers, dtype, due)
        if case.bytes <= POOL_BYTES:
            yield case


def missing() -> str | None:
    """One sentence about what this machine lacks; None if the benchmark can run."""
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        return f"The benchmark needs {error.name}, which is not installed here."
    if not torch.cuda.is_available():
        return "The benchmark needs a GPU that torch can use, and there is none; --check runs without one."
    return None


def layers_of(case: Case, device: str) -> list[Any]:
    """Random layers of the case's shape, ``[blocks, heads, tokens, 2 * head_dim]`` with tokens outermost."""
    import torch

    shape = (
        case.due,
        case.block_tokens,
        HEADS,
        2 * HEAD_DIM * case.layer_bytes // (case.block_tokens * HEADS * 2 * HEAD_DIM),
    )
    return [
        torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
        .view(getattr(torch, case.dtype))
        .permute(0, 2, 1, 3)
        for _ in range(case.layers)
    ]


def milliseconds(call: Callable[[], Any]) -> float:
    """The median time of a call on the device."""
    import torch

    for _ in range(3):
        call()
    times = []
    for _ in range(REPEATS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        call()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return median(times)


def measure(case: Case, step_milliseconds: float) -> str:
    """One row of the table."""
    import torch

    from kvledger.audit.engines.content.fingerprint_triton import TritonFingerprints

    torch.cuda.empty_cache()
    layers = layers_of(case, "cuda")
    prints = TritonFingerprints(layers, 1)
    blocks = torch.randperm(case.due, device="cuda")
    assert torch.equal(prints.of(blocks[:2]), prints.by_layer_torch(blocks[:2]).sum(1)), case
    seals = torch.zeros(case.due, dtype=torch.int64, device="cuda")
    seals[blocks] = prints.of(blocks)
    sums = torch.zeros((case.due, 1), dtype=torch.int64, device="cuda")
    differs = torch.zeros(case.due, dtype=torch.bool, device="cuda")

    def compare() -> None:
        prints.write(blocks, sums)
        prints.mark(blocks, sums, seals, differs, renew=False)

    kernel = milliseconds(lambda: prints.write(blocks, sums))
    verify = milliseconds(compare)
    assert not differs.any().item(), "the kernel's fingerprints differ from call to call"
    source = torch.empty(case.bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = milliseconds(lambda: target.copy_(source))
    speed, copy_speed = case.bytes / kernel / 1e6, 2 * case.bytes / copy / 1e6
    return (
        f"| {case.block_tokens} | {case.layers} | {case.dtype} | {case.due} | {case.bytes / 1e6:,.0f} "
        f"| {kernel * 1e3:,.0f} | {verify * 1e3:,.0f} | {speed:,.0f} | {copy_speed:,.0f} "
        f"| {speed / copy_speed:.0%} | {verify / step_milliseconds:.2%} |"
    )


def check() -> None:
    """Interpret the kernel on the CPU and compile it for sm_90. Raises where the forms differ."""
    import torch

    from kvledger.audit.engines.content import fingerprint_triton as form

    for dtype in DTYPES:
        layers = layers_of(Case(16, 2, dtype, 5), "cpu")
        prints = form.TritonFingerprints(layers, 1)
        assert torch.equal(prints.by_layer([4, 0, 3]), prints.by_layer_torch([4, 0, 3])), dtype
        index, sums, differs = torch.arange(5), torch.zeros(5, 1, dtype=torch.int64), torch.zeros(5) > 0
        seals = prints.of(index)
        layers[1][2, 3, 5, 7:9] = 0
        prints.write(index, sums)
        prints.mark(index, sums, seals, differs, renew=False)
        assert differs.tolist() == [False, False, True, False, False], dtype


def compile_for_hopper() -> None:
    """Compile both kernels for sm_90, which needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvledger.audit.engines.content import fingerprint_triton as form

    for unit_bytes, dense in itertools.product((1, 2, 4), (True, False)):
        constants = {"UNIT_BYTES": unit_bytes, "DENSE": dense, "SLICE": form.SLICE}
        constants |= {"BLOCKS": form.BLOCKS_PER_PROGRAM, "FIELDS": form.FIELDS}
        types = dict.fromkeys(("table", "blocks", "out"), "*i64")
        types |= dict.fromkeys(("count", "out_block", "out_layer"), "i32")
        signature = {name: types.get(name, "constexpr") for name in form.sum_slices.arg_names}
        triton.compile(
            ASTSource(fn=form.sum_slices, signature=signature, constexprs=constants),
            target=GPUTarget("cuda", 90, 32),
        )
    types = dict.fromkeys(("sums", "blocks", "seals"), "*i64") | {"differs": "*u8", "count": "i32"}
    signature = {name: types.get(name, "constexpr") for name in form.compare.arg_names}
    for renew in (True, False):
        triton.compile(
            ASTSource(fn=form.compare, signature=signature, constexprs={"RENEW": renew, "SIZE": 256}),
            target=GPUTarget("cuda", 90, 32),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 2 if something is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="check the kernel without a GPU")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="one block size and one number of layers")
    parser.add_argument("--step-ms", type=float, default=20.0, help="milliseconds of a step (default 20)")
    options = parser.parse_args(arguments)
    if options.check:
        os.environ["TRITON_INTERPRET"] = "1"
        check()
        print("The interpreted kernel equals the torch form, and finds the changed block.", flush=True)
        os.environ.pop("TRITON_INTERPRET")
        os.execv(sys.executable, [sys.executable, __file__, "--compile"])
    if options.compile:
        compile_for_hopper()
        print("The kernels compile for sm_90.")
        return 0
    lacking = missing()
    if lacking:
        print(lacking, file=sys.stderr)
        return 2
    print(
        "| tokens a block | layers | dtype | due blocks | MB | kernel us | verify us | kernel GB/s "
        "| copy GB/s | bandwidth | share of the step |"
    )
    print("|" + "---|" * 11)
    for case in cases(options.quick):
        print(measure(case, options.step_ms), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
