"""The ledger of blocks, kept from the events of level ``blocks`` alone.

A block that nothing is known of has no record; one whose holders may not all be known is not ``known``,
and then nothing is claimed of its count. What a pool states of a block
(:class:`~kvledger.audit.events.BlockStatesReported`, the counts that come with a touch or a free) is compared
and then believed, so that one fault is told once.

``BlockLedger`` judges nothing: it gives what two sides say of one thing, or what cannot be, as
subjects for ``invariants/blocks.py``. Its state is plain: structs, dicts, lists and numbers.
"""

from __future__ import annotations

from typing import ClassVar

from ... import events as ev
from . import hashes
from .decode import calls
from .engine_reports import STATEMENTS
from .holdings import Accounts, Holdings
from .operations import OPERATIONS
from .subjects import Finding

_APPLYING = OPERATIONS | hashes.HASHES | STATEMENTS

_SCHEDULING = (
    ev.LookedUp,
    ev.Matched,
    ev.AdmissionFailed,
    ev.Admitted,
    ev.LookupsCounted,
    ev.LoadPlanned,
    ev.SavePlanned,
    ev.BlocksPromised,
    ev.Stepped,
    ev.Repeated,
)
"""What is told of a step after what its scheduling called pools for. Steps may only be told when something
else is; a load that was polled for comes after them."""


class BlockLedger(Holdings):
    """Blocks of one engine, kept from its events in order."""

    EVENTS: ClassVar[frozenset[type[ev.Event]]] = frozenset((*_APPLYING, ev.PoolCalls))

    def apply(self, event: ev.Event, accounts: Accounts) -> list[Finding]:
        """Keep one event of blocks; what the checks should see of it."""
        self.found = []
        self.lost = []
        self.accounts = accounts
        for call in calls(event) if type(event) is ev.PoolCalls else (event,):
            _APPLYING[type(call)](self, call)
        return self.found

    def after(self, event: ev.Event, accounts: Accounts) -> list[Finding]:
        """What an event of tokens, just posted, says of blocks."""
        self.found = []
        self.accounts = accounts
        if self.hashed and type(event) not in _SCHEDULING:
            hashes.judge_pending(self)
        if type(event) is ev.LoadFailed:
            hashes.load_failed(self, event)
        elif self.failed and type(event) is ev.Stepped:
            hashes.computed_again(self)
        elif type(event) is ev.Finished and event.request in self.held:
            self.ending[event.request] = event.at
        return self.found
