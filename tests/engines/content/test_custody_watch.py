"""What a worker emits about transfers: fingerprints of whole blocks, read at the right moment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvledger.audit.engines.connectors.metadata_reader import whole_blocks  # noqa: E402
from kvledger.audit.engines.content.custody import CustodyWatch  # noqa: E402
from kvledger.audit.engines.content.layout import GroupLayout, Layout  # noqa: E402
from kvledger.audit.engines.content.parts import all_parts, parts_of  # noqa: E402
from kvledger.audit.engines.content.seals import Seals  # noqa: E402
from kvledger.audit.engines.readers import reader_of  # noqa: E402
from kvledger.audit.events import BlocksMoved  # noqa: E402

SIZE = 4


class ExampleConnector:
    """The hooked methods, and loads that write 7 into blocks."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.metadata: Any = None
        self.failed: set[int] = set()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self.metadata = connector_metadata

    def start_load_kv(self, forward_context: Any) -> None:
        for request in self.metadata.requests:
            for slot in [] if request.is_store else request.slot_mapping.tolist():
                for layer in self.layers:
                    layer[slot // SIZE, 0, :, slot % SIZE] = 7

    def wait_for_save(self) -> None: ...

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.failed

    def clear_connector_metadata(self) -> None: ...


class Bench:
    """A connector, its caches, and the events of its :class:`CustodyWatch`."""

    def __init__(self) -> None:
        self.layers = [torch.rand(6, 1, 2, SIZE, 8) for _ in range(2)]
        group = GroupLayout(0, SIZE, self.layers, [["a"], ["b"]], 1)
        layout = Layout(6, {0: group}, {})
        self.events: list[BlocksMoved] = []
        self.seals: Seals[int] = Seals(layout, 5, seen_from_start=True)
        log = SimpleNamespace(now=lambda: 0, emit=self.events.append)
        self.watch = SimpleNamespace(step=3, rank=0, layout=layout, seals=self.seals, log=log)
        self.connector = ExampleConnector(self.layers)
        self.custody = CustodyWatch(self.watch, self.connector, 5, self.fail)

    def fail(self, hook: str, error: Exception, removed: bool) -> None:
        raise error

    def step(self, *requests: tuple[bool, list[int]], after_load: Any = lambda: None) -> None:
        rows = [SimpleNamespace(is_store=s, slot_mapping=torch.tensor(slots)) for s, slots in requests]
        connector = self.connector
        connector.bind_connector_metadata(SimpleNamespace(requests=rows))
        connector.start_load_kv(None)
        after_load()
        connector.wait_for_save()
        connector.get_finished(set())
        connector.get_block_ids_with_load_errors()
        connector.clear_connector_metadata()


def slots(*blocks: int) -> list[int]:
    return [block * SIZE + offset for block in blocks for offset in range(SIZE)]


def test_a_stored_and_a_loaded_copy_have_equal_fingerprints() -> None:
    bench = Bench()
    bench.step((False, slots(1)))
    for layer in bench.layers:
        layer[2] = layer[1]
    bench.step((True, slots(2)))
    loaded, stored = bench.events
    assert (loaded.out, loaded.blocks, stored.out, stored.blocks) == (False, [1], True, [2])
    assert loaded.prints == stored.prints
    assert len(loaded.prints) == 2 * 2 * 8
    assert loaded.key_name == stored.key_name


def test_a_load_is_read_before_the_forward_pass_writes_its_last_token_again() -> None:
    bench, other = Bench(), Bench()
    bench.step((False, slots(1)), after_load=lambda: bench.layers[0].fill_(3))
    other.step((False, slots(1)))
    assert bench.events[0].prints == other.events[0].prints


def test_blocks_of_which_a_part_moves_are_left_out() -> None:
    assert whole_blocks([*slots(1), *slots(2)[:3], *slots(3), 12], SIZE) == [1, 3]


def test_blocks_whose_load_failed_are_left_out() -> None:
    bench = Bench()
    bench.connector.failed = {2}
    bench.step((False, slots(1, 2)))
    (moved,) = bench.events
    assert moved.blocks == [1]
    assert len(moved.prints) == 2 * 2 * 8


def test_a_stored_block_is_compared_with_its_seal() -> None:
    bench = Bench()
    bench.seals.seal(0, [1, 2], 2)
    bench.layers[1][2, 0, 0, 0, 0] += 1
    bench.step((True, slots(1, 2, 4)))
    assert bench.events[0].differed == [2, 2]


def test_exchanged_halves_have_exchanged_fingerprints() -> None:
    bench = Bench()
    bench.step((True, slots(2)))
    for layer in bench.layers:
        layer[2] = layer[2].roll(4, dims=-1)
    bench.step((True, slots(2)))
    before, after = bench.events
    for layer in range(2):
        keys, values = before.prints[16 * layer :][:8], before.prints[16 * layer :][8:16]
        assert after.prints[16 * layer :][:16] == values + keys


def test_keys_and_values_on_an_axis_of_their_own_are_the_parts() -> None:
    layer = torch.rand(3, 1, 2, SIZE, 2, 8)
    keys, values = parts_of(layer)
    assert torch.equal(keys, layer[:, :, 0])
    assert torch.equal(values, layer[:, :, 1])
    assert len(all_parts([layer, layer])) == 4


def test_a_removed_watch_restores_the_connector() -> None:
    bench = Bench()
    bench.custody.remove()
    bench.step((True, slots(1)))
    assert bench.events == []


def reader(name: str, **attributes: Any) -> Any:
    found = reader_of(type(name, (), attributes)())
    assert found is not None
    return found


def test_offloading_jobs_are_moves() -> None:
    ids = [SimpleNamespace(block_ids=[3, 4]), SimpleNamespace(block_ids=[5])]
    store = SimpleNamespace(req_id="a", src_spec=ids[0], dst_spec=ids[1])
    load = SimpleNamespace(req_id="b", src_spec=ids[1], dst_spec=ids[0])
    metadata = SimpleNamespace(store_jobs={1: store}, load_jobs={2: load})
    offloading = reader("OffloadingConnector")
    assert offloading.moves(metadata, SIZE) == ([3, 4], [("b", [3, 4], True)])
    assert not offloading.own_store  # its tiers are not known


def test_lmcache_mp_skips_the_blocks_that_a_retrieval_does_not_write() -> None:
    op = SimpleNamespace(block_ids=[[3, 4, 5]], start=0, end=12, skip_first_n_tokens=5)
    rows = [SimpleNamespace(request_id=d, direction=d, op=op) for d in ("STORE", "RETRIEVE")]
    moves = reader("LMCacheMPConnector").moves(SimpleNamespace(requests=rows), SIZE)
    assert moves == ([3, 4, 5], [("RETRIEVE", [5], True)])


def test_lmcache_moves_whole_blocks_of_its_slots() -> None:
    adapter = SimpleNamespace(_lmcache_chunk_size=SIZE, config=SimpleNamespace(remote_serde="naive"))
    load = SimpleNamespace(can_load=True, vllm_cached_tokens=4, lmcache_cached_tokens=11)
    save = SimpleNamespace(can_save=True, skip_leading_tokens=8)
    row = SimpleNamespace(
        load_spec=load, save_spec=save, slot_mapping=torch.tensor(slots(3, 4, 5)), token_ids=[0] * 12
    )
    lmcache = reader("LMCacheConnectorV1", _lmcache_engine=adapter)
    assert lmcache.exact
    assert lmcache.moves(SimpleNamespace(requests=[row]), SIZE) == ([5], [("", [4], False)])
    adapter.config.remote_serde = "cachegen"
    assert not lmcache.exact
