"""What a load brings is what was stored under the same block hash, or a finding says how it differs."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.checks.registry import Violation
from kvledger.audit.events import (
    Admitted,
    BlocksAllocated,
    BlocksCached,
    BlocksMoved,
    EngineStarted,
    Event,
    PoolSeen,
    RequestAdded,
    Stepped,
)
from kvledger.audit.ledger.content_postings import differences

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss

HASH = 77


def prints(*layers: tuple[int, int]) -> bytes:
    """Fingerprints of the keys and the values of each layer."""
    return b"".join(struct.pack("<qq", *layer) for layer in layers)


SENT = prints((11, 12), (21, 22), (31, 32))


def digits(*layers: tuple[int, int]) -> str:
    return prints(*layers).hex()


@pytest.mark.parametrize(
    ("arrived", "expected"),
    [
        (((12, 11), (22, 21), (32, 31)), ("exchanged", (0, 1, 2), "both")),
        (((11, 12), (22, 21), (31, 32)), ("exchanged", (1,), "both")),
        (((0, 0), (21, 22), (31, 32)), ("zeros", (0,), "both")),
        (((11, 12), (21, 9), (31, 9)), ("other", (1, 2), "values")),
        (((9, 12), (21, 22), (31, 32)), ("other", (0,), "keys")),
        (((9, 8), (7, 6), (5, 4)), ("other", (0, 1, 2), "both")),
    ],
)
def test_a_difference_names_layers_and_part(arrived: Any, expected: Any) -> None:
    assert differences(digits(*arrived), [SENT.hex()]) == expected


def test_a_difference_is_named_against_the_nearest_version() -> None:
    other = digits((91, 92), (93, 94), (95, 96))
    assert differences(digits((91, 92), (93, 94), (95, 9)), [SENT.hex(), other]) == ("other", (2,), "values")


def test_without_a_stored_version_nothing_differs() -> None:
    assert differences(digits((0, 0)), []) == ("", (), "")


class Engine:
    """A journal of an engine that stores block 1 for request 0 and loads block 2 for request 1."""

    def __init__(self) -> None:
        configuration: dict[str, Any] = {"block_size": 16, "blocks": 8}
        self.events: list[Event] = [
            EngineStarted(0, 1e9, "vllm", "0.32.0", "v1", "content", 1, configuration),
            PoolSeen(0, 0, 0, 8, 0, 7, 0, [0, 16, 2]),
        ]

    def begin(self, request: int, step: int, block: int, *, cached: bool = True, hash_id: int = HASH) -> None:
        self.events += [
            RequestAdded(step, request, f"r{request}", 17),
            BlocksAllocated(step, step, 0, "allocate_new_blocks", [request, 0, 1, block]),
        ]
        if cached:
            self.cache(request, step, block, hash_id)
        self.events += [
            Admitted(step, request, step, False, 0, 0, False, 0),
            Stepped(step, step, [request, 17, 0, 17], []),
        ]

    def cache(self, request: int, step: int, block: int, hash_id: int = HASH) -> None:
        self.events.append(BlocksCached(step, step, 0, [request, 0, 17, 1, block, hash_id, 16]))

    def moved(self, step: int, out: bool, block: int, data: bytes = SENT, **options: Any) -> None:
        own, key, differed = options.get("own", True), options.get("key", "k"), options.get("differed", [])
        self.events.append(BlocksMoved(step, step, 0, out, 0, key, own, [block], data, differed))

    def audit(self) -> tuple[list[Violation], dict[str, int]]:
        auditor = Auditor()
        for event in self.events:
            auditor.feed(event)
        found = [violation for violation in auditor.violations if violation.id.startswith("content/")]
        return found, auditor.ledger.sums.transfers


def stored_and_loaded(data: bytes, **options: Any) -> tuple[list[Violation], dict[str, int]]:
    engine = Engine()
    engine.begin(0, 1, 1)
    engine.moved(1, True, 1)
    engine.begin(1, 2, 2)
    engine.moved(2, False, 2, data, **options)
    return engine.audit()


@near_miss("content/transfer")
def test_a_load_that_brings_the_stored_bytes_is_no_finding() -> None:
    assert stored_and_loaded(SENT) == ([], {"stored": 1, "moved": 1})


@violates("content/transfer")
def test_exchanged_keys_and_values_are_named_with_both_sides() -> None:
    (found,), _ = stored_and_loaded(prints((12, 11), (22, 21), (32, 31)))
    assert found.id == "content/transfer"
    assert found.message == (
        "In step 2, a load filled block 2 for request r1 with KV that was not stored under its hash: keys "
        "and values are exchanged in all 3 layers. The block that was stored in step 1 held KV of request r0."
    )


@violates("content/transfer")
def test_a_truncated_load_names_the_layers_that_did_not_arrive() -> None:
    (found,), _ = stored_and_loaded(prints((11, 12), (91, 92), (93, 94)))
    assert "other bytes arrived in layers 1 to 2 of 3" in found.message


def loads_after_another_store(arrived: bytes, other: bytes) -> Violation:
    """Request 2 stores block 3 with ``other`` bytes under another hash; then ``arrived`` is loaded."""
    engine = Engine()
    engine.begin(0, 1, 1)
    engine.moved(1, True, 1)
    engine.begin(2, 2, 3, hash_id=0xBEEF)
    engine.moved(2, True, 3, other)
    engine.begin(1, 3, 2)
    engine.moved(3, False, 2, arrived)
    (found,), _ = engine.audit()
    return found


@violates("content/transfer")
def test_a_load_of_another_stored_block_names_the_hash_and_the_request_of_that_block() -> None:
    other = prints((91, 92), (93, 94), (95, 96))
    found = loads_after_another_store(other, other)
    assert found.message.endswith(
        "The block that was stored in step 1 held KV of request r0. The bytes that arrived are those of "
        "block 3, which was stored in step 2 under hbeef and held KV of request r2."
    )
    assert ("r2", 3, 2) == tuple(found.figures[f"arrived_{each}"] for each in ("request", "block", "step"))


@violates("content/transfer")
def test_layers_that_kept_the_kv_of_a_stored_block_name_that_block() -> None:
    other = prints((91, 92), (93, 94), (95, 96))
    found = loads_after_another_store(prints((11, 12), (21, 22), (95, 96)), other)
    assert "other bytes arrived in layer 2 of 3." in found.message
    assert "those of block 3, which was stored in step 2 under hbeef" in found.message


@violates("content/transfer")
def test_a_load_of_unknown_bytes_names_no_other_block() -> None:
    other = prints((91, 92), (93, 94), (95, 96))
    found = loads_after_another_store(prints((91, 92), (93, 94), (95, 97)), other)
    assert found.message.endswith("No block with the bytes that arrived is known to have been stored.")


@near_miss("content/transfer")
def test_another_engine_may_write_to_a_shared_store() -> None:
    found, counts = stored_and_loaded(prints((9, 9), (9, 8), (9, 7)), own=False)
    assert found == []
    assert counts == {"stored": 1, "foreign": 1}


@violates("content/transfer")
def test_zeros_and_exchanged_parts_are_faults_of_a_shared_store_too() -> None:
    (found,), _ = stored_and_loaded(prints((0, 0), (0, 0), (0, 0)), own=False)
    assert "only zeros arrived in all 3 layers" in found.message


@near_miss("content/transfer")
def test_fingerprints_of_another_key_are_not_compared() -> None:
    assert stored_and_loaded(prints((9, 9), (9, 8), (9, 7)), key="other") == ([], {"stored": 1, "unknown": 1})


@near_miss("content/transfer")
def test_either_of_two_stored_computations_of_one_prefix_may_arrive() -> None:
    second = prints((13, 14), (23, 24), (33, 34))
    engine = Engine()
    engine.begin(0, 1, 1)
    engine.moved(1, True, 1)
    engine.begin(1, 2, 2)
    engine.moved(2, True, 2, second)
    engine.begin(2, 3, 3)
    engine.moved(3, False, 3, SENT)
    engine.moved(3, False, 3, second)
    assert engine.audit() == ([], {"stored": 2, "moved": 2})


@violates("content/transfer")
def test_a_load_is_judged_when_its_block_gets_its_hash() -> None:
    engine = Engine()
    engine.begin(0, 1, 1)
    engine.moved(1, True, 1)
    engine.begin(1, 2, 2, cached=False)
    engine.moved(3, False, 2, prints((9, 12), (21, 22), (31, 32)))
    engine.cache(1, 4, 2)
    engine.events.append(Stepped(4, 4, [1, 1, 0, 18], []))
    (found,), _ = engine.audit()
    assert "in the keys of layer 0 of 3" in found.message


@near_miss("content/transfer")
def test_a_load_into_a_block_that_was_reallocated_is_not_judged() -> None:
    engine = Engine()
    engine.begin(0, 1, 1)
    engine.moved(1, True, 1)
    engine.begin(1, 2, 2, cached=False)
    engine.moved(3, False, 2, prints((9, 12), (21, 22), (31, 32)))
    engine.begin(2, 4, 2)  # the load's request was aborted
    engine.events.append(Stepped(5, 5, [2, 1, 0, 18], []))
    assert engine.audit() == ([], {"stored": 1, "unmatched": 1})


@violates("content/stored")
def test_a_store_of_changed_bytes_is_a_finding() -> None:
    engine = Engine()
    engine.begin(0, 1, 1)
    engine.moved(3, True, 1, differed=[1, 1])
    (found,), _ = engine.audit()
    assert found.id == "content/stored"
    assert "stored block 1 in step 3, whose KV is not what was sealed after step 1" in found.message


@near_miss("content/stored")
def test_a_store_of_a_reallocated_block_is_compared_with_no_older_seal() -> None:
    engine = Engine()
    engine.begin(0, 1, 1)
    engine.begin(1, 3, 1)
    engine.moved(3, True, 1, differed=[1, 1])
    found, _ = engine.audit()
    assert found == []
