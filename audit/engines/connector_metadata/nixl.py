"""``NixlConnector``: the blocks that a decode engine receives, and whose blocks a prefill engine hands over.

The metadata of a prefill engine names requests and no blocks: the decode engine reads the request's blocks
itself, at any time after its last token. The metadata of a decode engine has the blocks to fill, the last of
which may be partly full.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

from .metadata_reader import LoadedBlocks, MetadataReader, Moves, by_group

FULL_ATTENTION = ("FullAttentionSpec", "MLAAttentionSpec")
"""vLLM's kinds of groups of which a transfer moves every block from the first one that is missing."""


class NixlReader(MetadataReader):
    """Reads the requests that are handed over, and the blocks that are received."""

    READS: ClassVar[tuple[str, ...]] = ("loads", "blocks")

    def __init__(self, connector: Any) -> None:
        super().__init__(connector)
        config = getattr(connector, "_vllm_config", None)
        parallel = getattr(config, "parallel_config", None)
        self._workers = tuple(
            getattr(parallel, f"{name}_parallel_size", None)
            for name in ("tensor", "pipeline", "decode_context")
        )
        """The sizes of the engine's parallel groups, which must be equal at both ends."""
        self._permutes = getattr(
            getattr(config, "kv_transfer_config", None), "enable_permute_local_kv", False
        )
        """Whether received blocks are reordered."""

    @property
    def exact(self) -> bool:
        """False where both engines may lay their caches out in different orders."""
        return not self._permutes

    def filled(self, metadata: Any, block_size: int) -> set[int]:
        rows = (by_group(received.local_block_ids) for received in metadata.reqs_to_recv.values())
        return {block for row in rows for blocks in row for block in blocks}

    def groups(self, attention: Collection[int]) -> Collection[int]:
        """Those of full attention. Of a window only the last blocks move, and the places are not told."""
        config = getattr(self.connector, "_kv_cache_config", None)
        kinds = [type(each.kv_cache_spec).__name__ for each in getattr(config, "kv_cache_groups", ())]
        return [group for group in attention if group < len(kinds) and kinds[group] in FULL_ATTENTION]

    def moves(self, metadata: Any, block_tokens: Mapping[int, int]) -> Moves:
        found = Moves({}, [])
        for name, received in metadata.reqs_to_recv.items():
            for group, tokens in block_tokens.items():
                if blocks := self._whole(received, group, tokens):
                    found.loads.append(LoadedBlocks(name, blocks, True, group))
        return found

    def _whole(self, received: Any, group: int, block_tokens: int) -> list[int]:
        """The full blocks of one load; none if the prefill engine splits its blocks over other workers."""
        theirs = (
            getattr(received, "tp_size", None),
            getattr(received, "pp_size", 1),
            getattr(received, "dcp_size", 1),
        )
        ids, held = by_group(received.local_block_ids), getattr(received, "local_num_computed_blocks", ())
        tokens = getattr(getattr(received, "remote", None), "num_tokens", None)
        if theirs != self._workers or group >= len(ids) or tokens is None or group >= len(held):
            return []
        return ids[group][: max(0, tokens // block_tokens - held[group])]

    def handed_over(self, metadata: Any) -> Iterable[str]:
        return getattr(metadata, "reqs_in_batch", ())
