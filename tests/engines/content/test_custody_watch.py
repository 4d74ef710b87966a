"""What a worker emits about transfers: fingerprints of whole blocks, read at the right moment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvledger.audit.engines.connector_metadata import reader_of  # noqa: E402
from kvledger.audit.engines.connector_metadata.metadata_reader import whole_blocks  # noqa: E402
from kvledger.audit.engines.content.layout import GroupLayout, Layout, all_parts, parts_of  # noqa: E402  # noqa: E402
from kvledger.audit.engines.content.seals import Seals  # noqa: E402
from kvledger.audit.engines.content.transfer_fingerprints import CustodyWatch  # noqa: E402
from kvledger.audit.events import BlocksMoved  # noqa: E402

SIZE = 4


class ExampleConnector:
    """The hooked methods, and loads that write 7 into blocks."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.metadata: Any = None
        self.failed: set[int] = set()
        self.results = SimpleNamespace(finished_recving=set(), failed_recving=set())

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

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        return self.results

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
    assert offloading.moves(metadata, {0: SIZE}) == ({0: [3, 4]}, [("b", [3, 4], True, 0)])
    assert not offloading.own_store  # its tiers are not known


def test_offloading_jobs_have_the_blocks_of_one_group_behind_another() -> None:
    ends = SimpleNamespace(block_ids=[3, 4, 0, 5, 6], group_sizes=[2, 0, 3])
    store = SimpleNamespace(req_id="a", src_spec=ends, dst_spec=None)
    load = SimpleNamespace(req_id="b", src_spec=None, dst_spec=ends)
    metadata = SimpleNamespace(store_jobs={1: store}, load_jobs={2: load})
    offloading = reader("OffloadingConnector")
    assert [0, 2] == offloading.groups([0, 2])
    found = offloading.moves(metadata, {0: SIZE, 2: 2 * SIZE})
    loads = [("b", [3, 4], True, 0), ("b", [0, 5, 6], True, 2)]
    assert found == ({0: [3, 4], 2: [0, 5, 6]}, loads)
    assert offloading.moves(metadata, {2: SIZE}) == ({2: [0, 5, 6]}, loads[1:])


def nixl(**options: Any) -> Any:
    """The reader of a connector in an engine with one worker."""
    parallel = {f"{name}_parallel_size": 1 for name in ("tensor", "pipeline", "decode_context")}
    transfer = SimpleNamespace(enable_permute_local_kv=options.pop("permutes", False))
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**(parallel | options)), kv_transfer_config=transfer
    )
    return reader("NixlConnector", _vllm_config=config)


def received(tokens: int | None, held: int, blocks: Any, tp_size: int = 1) -> Any:
    remote = SimpleNamespace(num_tokens=tokens)
    row = SimpleNamespace(
        local_block_ids=blocks, local_num_computed_blocks=(held,), tp_size=tp_size, remote=remote
    )
    return SimpleNamespace(reqs_to_recv={"r": row}, reqs_in_batch=set())


@pytest.mark.parametrize(
    ("metadata", "blocks"),
    [
        (received(11, 0, ([3, 4, 5],)), [3, 4]),
        (received(12, 0, ([3, 4, 5],)), [3, 4, 5]),
        (received(11, 1, ([4, 5],)), [4]),
        (received(11, 2, ([5],)), []),
        (received(11, 0, ()), []),
        (received(None, 0, ([3, 4, 5],)), []),
        (received(11, 0, ([3, 4, 5],), tp_size=2), []),
    ],
    ids=["partly full", "full", "a local hit", "only a part", "a full hit", "older", "other workers"],
)
def test_nixl_fills_whole_blocks_up_to_the_tokens_of_the_prefill_engine(
    metadata: Any, blocks: list[int]
) -> None:
    assert nixl().moves(metadata, {0: SIZE}) == ({}, [("r", blocks, True, 0)] if blocks else [])


def test_nixl_tells_the_blocks_of_full_attention_but_not_of_a_window() -> None:
    kinds = [type(name, (), {})() for name in ("SlidingWindowSpec", "FullAttentionSpec")]
    groups = [SimpleNamespace(kv_cache_spec=kind) for kind in kinds]
    two = nixl()
    two.connector._kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
    assert [1] == two.groups([0, 1])
    metadata = received(11, 0, ([7], [3, 4, 5]))
    metadata.reqs_to_recv["r"].local_num_computed_blocks = (0, 0)
    assert two.moves(metadata, {1: SIZE}) == ({}, [("r", [3, 4], True, 1)])


def test_nixl_between_caches_of_other_orders_is_not_exact() -> None:
    assert nixl().exact
    assert not nixl(permutes=True).exact


class TwoGroups(Bench):
    """The same with a second group, whose blocks are twice as long and have two layers of their own."""

    def __init__(self, connector: str) -> None:
        super().__init__()
        self.custody.remove()
        more = [torch.rand(6, 1, 2, 2 * SIZE, 8)]
        groups = {
            0: GroupLayout(0, SIZE, self.layers, [["a"], ["b"]], 1),
            1: GroupLayout(1, 2 * SIZE, more, [["c"]], 1),
        }
        self.watch.layout = Layout(6, groups, {})
        self.watch.seals = self.seals = Seals(self.watch.layout, 5, seen_from_start=True)
        self.connector = type(connector, (ExampleConnector,), {})(self.layers)
        self.custody = CustodyWatch(self.watch, self.connector, 5, self.fail)


def test_transfers_of_each_group_are_read_from_its_own_layers() -> None:
    bench = TwoGroups("OffloadingConnector")
    ends = SimpleNamespace(block_ids=[1, 2, 0, 3], group_sizes=[2, 2])
    bench.seals.seal(1, [3], 2)
    bench.watch.layout.groups[1].layers[0][3] += 1
    store = SimpleNamespace(req_id="a", src_spec=ends, dst_spec=None)
    load = SimpleNamespace(req_id="b", src_spec=None, dst_spec=ends)
    connector = bench.connector
    connector.bind_connector_metadata(SimpleNamespace(store_jobs={1: store}, load_jobs={2: load}))
    connector.wait_for_save()
    connector.results = SimpleNamespace(finished_recving={"b"}, failed_recving=set())
    connector.get_transfer_results(set())
    connector.clear_connector_metadata()
    moved = [
        (event.out, event.group, event.blocks, len(event.prints), event.differed) for event in bench.events
    ]
    assert moved == [
        (True, 0, [1, 2], 2 * 2 * 2 * 8, []),
        (True, 1, [3], 2 * 8, [3, 2]),  # 0 is the null block
        (False, 0, [1, 2], 2 * 2 * 2 * 8, []),
        (False, 1, [3], 2 * 8, []),
    ]


def test_a_connector_that_tells_no_groups_is_not_observed_in_an_engine_with_two() -> None:
    bench = TwoGroups("ExampleConnector")
    bench.step((True, slots(1)))
    assert [] == bench.events


class HandingOver(Bench):
    """A prefill engine whose connector hands the blocks of request r over; ``final`` are its final blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.life: object = object()
        self.final: list[int] | None = []
        self.watch.final_blocks = lambda *_: None if self.final is None else (self.life, self.final)
        self.custody.reader = nixl()

    def batch(self, final: list[int] | None, *begun: str) -> list[list[int]]:
        """A step that hands over what began; returns the blocks that were read as stored."""
        self.events.clear()
        self.final = final
        connector = self.connector
        connector.bind_connector_metadata(SimpleNamespace(reqs_to_recv={}, reqs_in_batch=set(begun)))
        connector.wait_for_save()
        connector.clear_connector_metadata()
        return [event.blocks for event in self.events if event.out]


def test_blocks_of_a_request_that_is_handed_over_are_read_once_when_they_are_final() -> None:
    bench = HandingOver()
    assert bench.batch([0, 1]) == []  # another request's
    assert bench.batch([0, 1], "r") == [[1]]  # 0 is the null block
    assert bench.batch([0, 1, 2, 3]) == [[2, 3]]
    assert bench.batch([0, 1, 2, 3]) == []
    bench.life = object()  # preempted, and computed again in the same blocks
    assert bench.batch([0, 1, 2, 3]) == [[1, 2, 3]]
    assert bench.batch(None) == []
    assert bench.batch([4, 5]) == []


def test_blocks_of_a_nixl_transfer_are_read_when_it_has_arrived_unless_it_failed() -> None:
    bench = HandingOver()
    connector, rows = bench.connector, received(8, 0, ([3, 4],)).reqs_to_recv
    connector.bind_connector_metadata(
        SimpleNamespace(reqs_to_recv={"r": rows["r"], "lost": rows["r"]}, reqs_in_batch=set())
    )
    connector.clear_connector_metadata()
    connector.results = SimpleNamespace(finished_recving={"r", "lost"}, failed_recving={"lost"})
    connector.get_transfer_results(set())
    connector.clear_connector_metadata()
    assert [(False, [3, 4])] == [(event.out, event.blocks) for event in bench.events]


def test_lmcache_mp_skips_the_blocks_that_a_retrieval_does_not_write() -> None:
    op = SimpleNamespace(block_ids=[[3, 4, 5]], start=0, end=12, skip_first_n_tokens=5)
    rows = [SimpleNamespace(request_id=d, direction=d, op=op) for d in ("STORE", "RETRIEVE")]
    moves = reader("LMCacheMPConnector").moves(SimpleNamespace(requests=rows), {0: SIZE})
    assert moves == ({0: [3, 4, 5]}, [("RETRIEVE", [5], True, 0)])


def test_lmcache_mp_has_a_list_of_blocks_for_each_group() -> None:
    op = SimpleNamespace(block_ids=[[3, 4, 5], [6, 7]], start=0, end=12, skip_first_n_tokens=5)
    rows = [SimpleNamespace(request_id=d, direction=d, op=op) for d in ("STORE", "RETRIEVE")]
    moves = reader("LMCacheMPConnector").moves(SimpleNamespace(requests=rows), {0: SIZE, 1: 2 * SIZE})
    assert moves == ({0: [3, 4, 5], 1: [6, 7]}, [("RETRIEVE", [5], True, 0), ("RETRIEVE", [7], True, 1)])


def test_lmcache_moves_whole_blocks_of_its_slots() -> None:
    adapter = SimpleNamespace(_lmcache_chunk_size=SIZE, config=SimpleNamespace(remote_serde="naive"))
    load = SimpleNamespace(can_load=True, vllm_cached_tokens=4, lmcache_cached_tokens=11)
    save = SimpleNamespace(can_save=True, skip_leading_tokens=8)
    row = SimpleNamespace(
        load_spec=load, save_spec=save, slot_mapping=torch.tensor(slots(3, 4, 5)), token_ids=[0] * 12
    )
    lmcache = reader("LMCacheConnectorV1", _lmcache_engine=adapter)
    assert lmcache.exact
    assert lmcache.moves(SimpleNamespace(requests=[row]), {0: SIZE}) == ({0: [5]}, [("", [4], False, 0)])
    adapter.config.remote_serde = "cachegen"
    assert not lmcache.exact
