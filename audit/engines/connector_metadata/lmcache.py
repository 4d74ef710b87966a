"""``LMCacheConnectorV1``: the adapter of the lmcache package, and the one that vLLM bundles.

The connector only delegates to an adapter (``_lmcache_engine``), which keeps a tracker for each request:
the tokens that it knows and how many it has saved. The metadata has a row for each request that loads or
saves, with the slots of all its tokens. A load fills the slots from the local hit, rounded down to whole
chunks of the store, up to the last token that the store holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

from .metadata_reader import LoadedBlocks, MetadataReader, Moves, Saved, Tracking, by_group, whole_blocks


class LMCacheReader(MetadataReader):
    """Reads loads, saves and trackers."""

    READS: ClassVar[tuple[str, ...]] = ("loads", "saves", "tracker", "blocks")
    LOOKUP: ClassVar[str] = "_lmcache_engine.lookup_client.lookup"

    def __init__(self, connector: Any) -> None:
        super().__init__(connector)
        self.adapter = connector._lmcache_engine
        """LMCache's part of the connector."""
        self._chunk_tokens = int(self.adapter._lmcache_chunk_size)
        """Tokens of a chunk of its store."""

    @property
    def chunk_tokens(self) -> int:
        return self._chunk_tokens

    @property
    def exact(self) -> bool:
        """False for a codec that loses bits, blended KV, and loads that go on beside the forward pass."""
        config = getattr(self.adapter, "config", None)
        serde = getattr(config, "remote_serde", None) or "naive"
        options = ("use_layerwise", "enable_blending", "enable_async_loading")
        return serde == "naive" and not any(getattr(config, option, False) for option in options)

    def filled(self, metadata: Any, block_size: int) -> set[int]:
        return {slot // block_size for slots in self._loaded_slots(metadata) for slot in slots}

    def _loaded_slots(self, metadata: Any) -> Iterable[list[int]]:
        """The slots that each load fills."""
        for request in metadata.requests:
            load = request.load_spec
            if load is not None and load.can_load:
                start = load.vllm_cached_tokens // self.chunk_tokens * self.chunk_tokens
                yield request.slot_mapping[start : load.lmcache_cached_tokens].tolist()

    def loads(self, metadata: Any, block_size: int) -> list[LoadedBlocks]:
        slots = self._loaded_slots(metadata)
        return [LoadedBlocks("", whole_blocks(each, block_size), False) for each in slots]

    def stored(self, metadata: Any, block_size: int) -> list[int]:
        stored: list[int] = []
        for request in metadata.requests:
            save = request.save_spec
            if save is not None and save.can_save:
                slots = request.slot_mapping[save.skip_leading_tokens : len(request.token_ids)].tolist()
                stored += whole_blocks(slots, block_size)
        return stored

    def saves(self, metadata: Any) -> Iterable[Saved]:
        for request in metadata.requests:
            save = request.save_spec
            if save is not None and save.can_save and save.skip_leading_tokens < len(request.token_ids):
                yield Saved(request.req_id, save.skip_leading_tokens, len(request.token_ids))

    def tracking(self, request: Any, tokens: int) -> Tracking | None:
        tracker = self.adapter._request_trackers.get(request.request_id)
        if tracker is None:
            return None
        return Tracking(len(tracker.token_ids), tracker.num_saved_tokens, self._due(tracker, tokens))

    def _due(self, tracker: Any, tokens: int) -> int:
        """Tokens of whole chunks; of the prompt only, unless the adapter saves decoded tokens too."""
        adapter = self.adapter
        skips = (tracker.request_configs or {}).get("lmcache.skip_save", False)
        if (
            adapter.kv_role != "kv_both"
            or adapter.force_skip_save
            or tracker.skip_save
            or tracker.disagg_spec is not None
            or skips
        ):
            return -1
        if not adapter.config.save_decode_cache:
            tokens = min(tokens, tracker.prompt_len)
        return max(0, tokens) // self.chunk_tokens * self.chunk_tokens


# --- ``LMCacheMPConnector``, of lmcache and of vLLM: loads and saves as ranges of tokens with their
# blocks.
#
# Its trackers share the engine's own list of tokens, so they can't fall behind it. The blocks of a range
# are one list, or one list for each KV cache group.


class LMCacheMPReader(MetadataReader):
    """Reads loads and saves."""

    READS: ClassVar[tuple[str, ...]] = ("loads", "saves", "blocks")
    LOOKUP: ClassVar[str] = "scheduler_adapter.maybe_submit_lookup_request"

    @property
    def chunk_tokens(self) -> int:
        adapter = self.connector.scheduler_adapter
        return int(getattr(adapter, "lmcache_tokens_per_chunk", None) or adapter.chunk_size)

    def filled(self, metadata: Any, block_size: int) -> set[int]:
        return {
            block
            for request in metadata.requests
            if request.direction == "RETRIEVE"
            for blocks in by_group(request.op.block_ids)
            for block in blocks
        }

    def stored(self, metadata: Any, block_size: int) -> list[int]:
        rows = [row for row in metadata.requests if row.direction == "STORE"]
        return [block for row in rows for blocks in by_group(row.op.block_ids) for block in blocks]

    def groups(self, attention: Collection[int]) -> Collection[int]:
        return attention

    def moves(self, metadata: Any, block_tokens: Mapping[int, int]) -> Moves:
        found = Moves({group: [] for group in block_tokens}, [])
        for request in metadata.requests:
            for group, blocks in enumerate(by_group(request.op.block_ids)):
                if group not in block_tokens:
                    continue
                if request.direction == "STORE":
                    found.stored[group] += blocks
                else:
                    skipped = -(-int(getattr(request.op, "skip_first_n_tokens", 0)) // block_tokens[group])
                    found.loads.append(LoadedBlocks(request.request_id, blocks[skipped:], True, group))
        return found

    def saves(self, metadata: Any) -> Iterable[Saved]:
        for request in metadata.requests:
            if request.direction == "STORE":
                yield Saved(request.request_id, request.op.start, request.op.end)
