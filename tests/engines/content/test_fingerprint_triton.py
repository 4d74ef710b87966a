"""The Triton form, interpreted on the CPU, equals the torch form to the bit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]


def compare_random_views() -> None:
    from tests.engines.content.test_fingerprint import DTYPES, views

    from kvledger.audit.engines.content.fingerprint import Fingerprints
    from kvledger.audit.engines.content.fingerprint_triton import TritonFingerprints

    rng = random.Random(11)
    for seed in range(10):
        dtype = rng.choice(DTYPES[:-1])
        layers = [views(rng, dtype, seed + number) for number in range(rng.randint(1, 3))]
        plain, kernel = Fingerprints(layers, seed), TritonFingerprints(layers, seed)
        blocks = [rng.randrange(min(map(len, layers))) for _ in range(rng.randint(0, 6))]
        assert torch.equal(kernel.by_layer(blocks), plain.by_layer_torch(blocks)), (seed, layers[0].shape)
        assert torch.equal(kernel.of(blocks), plain.of(blocks))
    print("equal")


def verify_changed_blocks() -> None:
    from tests.engines.content.test_fingerprint import random_bytes

    from kvledger.audit.engines.content.fingerprint_triton import TritonFingerprints

    layers = [random_bytes((8, 2, 16, 64), torch.bfloat16, seed) for seed in range(3)]
    prints = TritonFingerprints(layers, 3)
    seals = prints.of(range(8))

    def differing(blocks: list[int], *, renew: bool = False) -> list[int]:
        index, differs = torch.tensor(blocks), torch.ones(len(blocks), dtype=torch.bool)
        sums = torch.ones(len(blocks), 1, dtype=torch.int64)
        prints.write(index, sums)
        prints.mark(index, sums, seals, differs, renew=renew)
        return [block for block, flag in zip(blocks, differs.tolist(), strict=True) if flag]

    assert differing([1, 5, 2]) == []
    layers[1][5, 1, 3, 7] += 1
    layers[2][2].copy_(layers[2][3])
    assert differing([1, 5, 2]) == [5, 2]
    assert differing([1, 5], renew=True) == [5]
    assert differing([1, 5, 2]) == [2]
    layers[0].zero_()
    assert differing(list(range(8))) == list(range(8))
    print("verified")


def seal_through_the_kernel() -> None:
    """Seals, comparisons and changes give equal results through the kernel and on the host."""
    from tests.engines.content.test_seals import history

    from kvledger.audit.engines.content.fingerprint_triton import TritonFingerprints

    assert history(0, form=TritonFingerprints) == history(0)
    print("sealed")


def test_the_triton_form_equals_the_torch_form_and_finds_the_blocks_that_differ() -> None:
    """In a process of its own: Triton reads the variable when a kernel is defined."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    functions = "t.compare_random_views(); t.verify_changed_blocks(); t.seal_through_the_kernel()"
    code = f"from tests.engines.content import test_fingerprint_triton as t; {functions}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal", "verified", "sealed"]
