"""``NixlConnector``: the blocks that a decode engine receives, and whose blocks a prefill engine hands over.

The metadata of a prefill engine names requests and no blocks: the decode engine reads the request's blocks
itself, at any time after its last token. The metadata of a decode engine has the blocks to fill, the last of
which may be partly full.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from .metadata_reader import LoadedBlocks, MetadataReader


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
        filled: set[int] = set()
        for received in metadata.reqs_to_recv.values():
            for ids in received.local_block_ids:
                filled.update(ids if isinstance(ids, list | tuple) else (ids,))
        return filled

    def loads(self, metadata: Any, block_size: int) -> list[LoadedBlocks]:
        rows = ((name, self._whole(row, block_size)) for name, row in metadata.reqs_to_recv.items())
        return [LoadedBlocks(name, blocks, True) for name, blocks in rows if blocks]

    def _whole(self, received: Any, block_size: int) -> list[int]:
        """The full blocks of one load; none if the prefill engine splits its blocks over other workers."""
        theirs = (
            getattr(received, "tp_size", None),
            getattr(received, "pp_size", 1),
            getattr(received, "dcp_size", 1),
        )
        ids, held = received.local_block_ids, getattr(received, "local_num_computed_blocks", ())
        tokens = getattr(getattr(received, "remote", None), "num_tokens", None)
        if theirs != self._workers or not ids or tokens is None or not held:
            return []
        blocks = ids[0] if isinstance(ids[0], list | tuple) else ids
        return list(blocks[: max(0, tokens // block_size - held[0])])

    def handed_over(self, metadata: Any) -> Iterable[str]:
        return getattr(metadata, "reqs_in_batch", ())
