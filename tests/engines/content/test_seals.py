"""Seals and sketches give equal results on the host and on a device, whose results arrive late."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvledger.audit.engines.content import choose_fingerprint as chosen  # noqa: E402
from kvledger.audit.engines.content import device_buffers  # noqa: E402
from kvledger.audit.engines.content.fingerprint import Fingerprints  # noqa: E402
from kvledger.audit.engines.content.seal_fingerprints import PartPrints  # noqa: E402
from kvledger.audit.engines.content.seals import Seals  # noqa: E402
from kvledger.audit.engines.content.sketches import PROJECTIONS, Sketches, SketchWatch  # noqa: E402
from kvledger.audit.ledger.content_postings import distances  # noqa: E402

BLOCKS = 24
KEY = 77


class LateEvent:
    """An event that has happened when ``happened`` says so; a step must not wait for it."""

    happened = True

    def record(self) -> None: ...

    def query(self) -> bool:
        return LateEvent.happened

    def synchronize(self) -> None:
        assert LateEvent.happened, "a step waits for the device"


def caches(seed: int) -> list[Any]:
    """Three layers of random bytes, one of them in another memory order."""
    torch.manual_seed(seed)
    layers = [torch.randint(0, 2**15, (BLOCKS, 2, 4, 8), dtype=torch.int16) for _ in range(3)]
    layers[1] = layers[1].permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    return layers


def seals_of(layers: list[Any], form: Callable[..., Any] | None, device: bool) -> Seals[int]:
    groups = {0: SimpleNamespace(layers=layers[:2]), 1: SimpleNamespace(layers=layers[2:])}
    layout: Any = SimpleNamespace(blocks=BLOCKS, groups=groups)
    return Seals(layout, KEY, seen_from_start=True, form=form, new_event=LateEvent if device else None)


def history(seed: int, form: Callable[..., Any] | None = None) -> list[Any]:
    """Random seals, changes and comparisons: all results and fingerprints. ``form``: on a device."""
    layers, dice = caches(seed), random.Random(seed)
    seals = seals_of(layers, form, device=form is not None)
    seen: list[Any] = []
    for step in range(30):
        group, some = dice.randrange(2), dice.sample(range(1, BLOCKS), dice.randint(0, 9))
        action = dice.randrange(3)
        if action == 0:
            seals.seal(group, some, step)
        elif action == 1:
            dice.choice(layers)[some, 1, dice.randrange(4)] += 1
        else:
            seals.compare(group, [*some, *some[:2]], step, renew=dice.random() < 0.5)
            seen += seals.results()
    values: Any = seals.values
    return [seen, values.values[1:].tolist(), seals.steps, seals.key_name]


def test_results_of_a_device_are_those_of_the_host() -> None:
    for seed in range(20):
        assert history(seed) == history(seed, Fingerprints)


def test_results_are_returned_once_they_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = caches(1)
    seals = seals_of(layers, Fingerprints, device=True)
    monkeypatch.setattr(LateEvent, "happened", False)
    seals.seal(0, [3, 4], 1)
    layers[0][4] += 1
    for label in range(20):  # more than there are slots
        seals.compare(0, [3, 4], label, renew=label == 0)
    assert [] == seals.results()
    monkeypatch.setattr(LateEvent, "happened", True)
    assert [(0, [4]), *((label, []) for label in range(1, 20))] == seals.results()


def test_a_slot_is_used_again_and_nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    seals = seals_of(caches(2), Fingerprints, device=True)

    def refuse(*_: Any) -> None:
        raise AssertionError("a slot is created in a step")

    monkeypatch.setattr(device_buffers.Slots, "_new", refuse)
    for step in range(50):
        seals.seal(0, [1, 2, 3], step)
        seals.compare(0, [1, 2], step, renew=True)
        assert [(step, [])] == seals.results()


def test_more_blocks_than_a_slot_has_room_for_are_one_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        device_buffers.Slots.__init__,
        "__kwdefaults__",
        {
            **(device_buffers.Slots.__init__.__kwdefaults__ or {}),
            "room": 5,
        },
    )
    layers = caches(3)
    seals = seals_of(layers, Fingerprints, device=True)
    seals.seal(0, range(1, 20), 1)
    layers[1][[2, 17]] += 1
    seals.compare(0, range(1, 20), 7, renew=False)
    assert [(7, [2, 17])] == seals.results()


def test_fingerprints_of_parts_are_equal_on_a_device() -> None:
    layers = [torch.rand(400, 1, 2, 4, 8) for _ in range(2)]
    blocks = random.Random(1).sample(range(400), 300)  # more than a slot has room for
    host, device = PartPrints(layers, 5).read(blocks), PartPrints(layers, 5, new_event=LateEvent).read(blocks)
    assert device.arrived(wait=False)
    assert host.result().tolist() == device.result().tolist()


def test_sketches_are_equal_on_a_device_and_near_for_near_blocks() -> None:
    layers = [torch.randn(400, 1, 2, 4, 8) for _ in range(2)]
    blocks = random.Random(1).sample(range(400), 300)  # more than a slot has room for
    host, device = Sketches(layers, 5).read(blocks), Sketches(layers, 5, new_event=LateEvent).read(blocks)
    assert device.arrived(wait=False)
    rows = host.result()
    assert rows.tolist() == device.result().tolist()
    assert (300, 2 * 2 * PROJECTIONS) == rows.shape

    again = [layer + 1e-3 * torch.randn(layer.shape) for layer in layers]
    digits = [
        each.tobytes().hex() for each in (rows[0], Sketches(again, 5).read(blocks).result()[0], rows[1])
    ]
    assert max(distances(digits[0], digits[1], PROJECTIONS)) < 0.02
    assert min(distances(digits[0], digits[2], PROJECTIONS)) > 0.3


@pytest.mark.parametrize(("dtype", "named"), [("bfloat16", ""), ("uint8", "uint8")])
def test_a_kv_cache_of_bytes_gets_no_sketches_and_a_sentence_says_so(dtype: str, named: str) -> None:
    layers = [torch.zeros(BLOCKS, 1, 2, 4, 8, dtype=getattr(torch, dtype))]
    groups = {0: SimpleNamespace(group=0, layers=layers)}
    layout: Any = SimpleNamespace(of_attention=lambda: groups)
    log = SimpleNamespace(now=lambda: 1, emit=(emitted := []).append)
    watch = SketchWatch(layout, 5, "k", log, rank=0)  # type: ignore[arg-type]
    watch.take(0, [3], 1)
    watch.emit()

    assert (1 if not named else 0) == len(emitted)
    assert watch.sentence == (
        "Blocks that are computed again are not compared: the KV cache of group 0 has the dtype uint8."
        if named
        else "Blocks that are computed again are compared by 8 projections of each part."
    )


def test_without_triton_torch_computes_fingerprints_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class OnGpu:
        device = SimpleNamespace(type="cuda")

    def make(layers: Any, key: int, *, factors: Any) -> str:
        return "torch"

    monkeypatch.setitem(__import__("sys").modules, f"{chosen.__package__}.fingerprint_triton", None)
    monkeypatch.setattr(chosen, "Fingerprints", make)
    monkeypatch.setattr(chosen.logger, "propagate", True)
    with caplog.at_level("WARNING", logger=chosen.logger.name):
        assert "torch" == chosen.fingerprints_of([OnGpu()], 1)
    (line,) = caplog.messages
    assert line.startswith("kvledger computes fingerprints with torch, not with Triton: ")
