"""What the ledger keeps of the contents of blocks: who seals them, and which were found changed."""

from __future__ import annotations

from .. import events as ev
from ..bounded_tables import keep_newest
from .blocks.ledger import BlockLedger
from .blocks.provenance import EVERY, lacking


class ContentState:
    """What decides how the contents of one engine's blocks are judged."""

    def __init__(self) -> None:
        self.watches = False
        """Whether some worker seals its blocks."""
        self.workers: dict[int, bool] = {}
        """The workers that seal their blocks."""
        self.block_tokens: dict[int, int] = {}
        """Tokens per block, by checked group."""
        self.excluded: list[str] = []
        """Why some groups, or all, are not checked."""
        self.changed: dict[int, int] = {}
        """Blocks whose bytes were found changed, with the step."""
        self.promised: dict[int, int] = {}
        """Blocks that a connector promised to fill, with the step of the promise."""
        self.promised_in_part: dict[int, int] = {}
        """Blocks of which a connector promised to fill the beginning: the request computes the rest."""
        self.loading_requests: dict[int, int] = {}
        """Requests that were promised external tokens, with the step, where the blocks are not known."""

    def watched(self, event: ev.ContentWatched) -> None:
        """A worker introduces its watch."""
        self.watches = self.watches or bool(event.groups)
        if event.groups:
            self.workers[event.worker] = True
        for index in range(0, len(event.groups), 4):
            self.block_tokens[event.groups[index]] = event.groups[index + 1]
        self.excluded += [sentence for sentence in event.excluded if sentence not in self.excluded]

    def noted(self, event: ev.Event, blocks: int) -> None:
        """Note which blocks, or whose, a connector promised to fill. ``blocks``: the size of the pools."""
        if isinstance(event, ev.BlocksPromised):
            whole = (event.start + event.tokens) % event.block_tokens == 0
            self.promised.update(dict.fromkeys(event.blocks if whole else event.blocks[:-1], event.step))
            self.promised_in_part.update(dict.fromkeys([] if whole else event.blocks[-1:], event.step))
        elif isinstance(event, ev.Admitted) and event.external_tokens > 0:
            self.loading_requests.pop(event.request, None)
            self.loading_requests[event.request] = event.step
            keep_newest(self.loading_requests, max(1024, blocks))

    def loads_into(self, holdings: BlockLedger, block: int, allocated: tuple[int, int]) -> bool:
        """Whether a load was to fill a block since its allocation, and is not known to have failed."""
        step, request = allocated
        several = len(self.block_tokens) > 1 or len(holdings.pools) > 1
        promised = self.promised.get(block, -1) >= step
        if not promised and not (several and self.loading_requests.get(request, -1) >= step):
            return False
        for number, pool in holdings.pools.items():
            if block in pool.records and lacking(holdings, number, block, 0, EVERY):
                return False
        return True

    def filled_in_part(self, block: int, code: int, allocated: tuple[int, int]) -> bool:
        """Whether a load filled the beginning of a block since its allocation, and nobody filled the rest."""
        return code == ev.UNFILLED and self.promised_in_part.get(block, -1) >= allocated[0]
