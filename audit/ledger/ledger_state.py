"""The state of a ledger, and its sums.

Plain data that the posting functions share and a checkpoint saves: open accounts, undelivered steps, open
transfers, and what is known of contents. The functions are in the other files of this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import NamedTuple

import msgspec

from .. import events as ev
from ..bounded_tables import keep_newest, take_oldest
from ..figures.sums import Sums, add_tokens
from ..figures.totals import Totals
from .account import Account
from .blocks.ledger import BlockLedger
from .blocks.reads import EVERY, lacking
from .clocks import QueueClock, StepClock
from .entries import Entry
from .slots import SlotAccount
from .transfers import WorkerTransfers
from .weights import Weights

# --- sums ----------------------------------------------------------------------------------------------
#
# What a ledger adds up. Nothing here decides how an event is posted, so two ledgers' sums can be added.


ERRORS_KEPT = 16
"""Kinds of exceptions that are counted by name."""

OTHER_ERRORS = "other exceptions"
"""All further kinds."""


class Recomputed(Sums):
    """Blocks that were computed more than once, by their sketches."""

    compared: int = 0
    """Blocks that were compared with an earlier computation."""
    differed: int = 0
    """Those of them whose distance is above the threshold."""
    largest: float = 0.0
    """The largest distance of the others."""

    def merge(self, more: Recomputed) -> None:
        """Add the counts of another engine; of the largest distances the larger one stays."""
        self.compared += more.compared
        self.differed += more.differed
        self.largest = max(self.largest, more.largest)


class LedgerSums(Sums):
    """The sums of one engine's ledger, or of several ledgers."""

    ended: Totals = msgspec.field(default_factory=Totals)
    """Sums over the accounts of ended requests; they only rise."""
    gaps: int = 0
    """How many times events were lost."""
    removed_events: int = 0
    """Events that rotation removed from the beginning of the journal; they are no loss."""
    hook_failures: int = 0
    """How many times a hook failed."""
    engine_errors: dict[str, int] = {}
    """How often each exception left a hooked method of the engine, by type and method: the first
    :data:`ERRORS_KEPT` kinds, and :data:`OTHER_ERRORS`."""
    watches: int = 0
    """How many workers began to seal their blocks."""
    weights_changes: dict[str, int] = {}
    """Changes of weights by kind, and the calls that changed none or may have changed some."""
    contents: dict[str, int] = {}
    """Bytes and microseconds, and blocks at hits, each once for every request that reads it and every worker.

    ``verified``: held the sealed bytes; ``differed``: held others; ``unsealed``: nobody was seen to fill it.
    The others could not be compared. ``same_step``: computed in the same step; ``unsampled``: left out of the
    sample; ``unseen``: filled before the observation; ``loaded``: filled by a load that the worker did not
    see; ``arrived``: a miss, the connector loaded the block for this request; ``unmatched``: read by a
    request that the ledger can't find in that step.
    """
    prefixes: dict[str, int] = {}
    """Hit blocks by how their prefix compares with the reader's: ``equal``, ``other``, ``unknown``."""
    transfers: dict[str, int] = {}
    """Blocks by what their transfers to and from a store showed."""
    recomputed: Recomputed = msgspec.field(default_factory=Recomputed)
    """Blocks that were computed more than once."""

    def merge(self, more: LedgerSums) -> None:
        """Add the sums of another ledger, which read later events."""
        super().merge(more)
        errors, self.engine_errors = self.engine_errors, {}
        for error, times in errors.items():
            self.count_error(error, times)

    def count_error(self, error: str, times: int = 1) -> None:
        """Count exceptions that left a hooked method."""
        room = error in self.engine_errors or len(self.engine_errors) < ERRORS_KEPT
        add_tokens(self.engine_errors, error if room else OTHER_ERRORS, times)

    def count_content(self, name: str, blocks: int = 1) -> None:
        """Count blocks by what happened to their contents."""
        add_tokens(self.contents, name, blocks)

    def count_prefixes(self, name: str, blocks: int) -> None:
        """Count hit blocks by what comparing their prefix showed."""
        add_tokens(self.prefixes, name, blocks)

    def count_transfer(self, name: str, blocks: int = 1) -> None:
        """Count blocks by what a transfer showed."""
        add_tokens(self.transfers, name, blocks)


# --- content state -------------------------------------------------------------------------------------
#
# What the ledger keeps of the contents of blocks: who seals them, and which were found changed.


class ContentState(msgspec.Struct):
    """What decides how the contents of one engine's blocks are judged."""

    watches: bool = False
    """Whether some worker seals its blocks."""
    workers: dict[int, bool] = {}
    """The workers that seal their blocks."""
    block_tokens: dict[int, int] = {}
    """Tokens per block, by checked group."""
    excluded: list[str] = []
    """Why some groups, or all, are not checked."""
    changed: dict[int, int] = {}
    """Blocks whose bytes were found changed, with the step."""
    promised: dict[int, int] = {}
    """Blocks that a connector promised to fill, with the step of the promise."""
    promised_in_part: dict[int, int] = {}
    """Blocks of which a connector promised to fill the beginning: the request computes the rest."""
    loading_requests: dict[int, int] = {}
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


# --- sketch state --------------------------------------------------------------------------------------
#
# What the ledger keeps of the sketches of computed blocks, by block hash.


DIGITS_KEPT = 128 << 20
"""The most hexadecimal digits of sketches that are kept; the oldest are dropped first."""


class Computation(NamedTuple):
    """One computation of a block: where and when, and its sketch as hexadecimal digits."""

    step: int
    block: int
    allocated: int
    """The step of the block's allocation."""
    writer: str
    """The request that filled the block."""
    sketch: str


class SketchState(msgspec.Struct):
    """The last computation of each block hash. Plain data only."""

    key_name: str = ""
    """The function and key of the sketches; others can't be compared."""
    projections: int = 0
    """Numbers of a sketch for each part of a block."""
    kept: dict[tuple[int, int, int], tuple[int, int, int, str, str]] = {}
    """By hash id, worker and group: the last :class:`Computation`."""
    digits: int = 0
    """Digits of these sketches."""
    waiting: dict[tuple[int, int], list[tuple[int, int, int, int, str]]] = {}
    """By pool and block: computations of a block without a hash, one for each worker: worker, group,
    steps of allocation and computation, sketch."""

    def keep(self, key: tuple[int, int, int], computed: Computation) -> None:
        """Keep a computation in place of the one before."""
        before = self.kept.pop(key, None)
        if before is not None:
            self.digits -= len(before[-1])
        self.kept[key] = (*computed,)
        self.digits += len(computed.sketch)
        while self.digits > DIGITS_KEPT:
            self.digits -= sum(len(one[-1]) for one in take_oldest(self.kept))

    def forget(self) -> None:
        """What follows can't be compared with what was computed before."""
        self.digits = 0
        self.kept.clear()
        self.waiting.clear()

    def wait(self, place: tuple[int, int], row: tuple[int, int, int, int, str]) -> None:
        """Keep a computation of a block without a hash in place of the same worker's one before."""
        others = [each for each in self.waiting.get(place, ()) if each[0] != row[0]]
        self.waiting[place] = [*others, row]

    def use_key(self, name: str, projections: int) -> None:
        """Sketches of another key follow: forget all others."""
        if (name, projections) != (self.key_name, self.projections):
            self.key_name, self.projections = name, projections
            self.forget()


# --- encoder cache ---------------------------------------------------------------------------------------


class EncoderCache(msgspec.Struct):
    """The encoder cache of one engine, by identity of the input. Sizes are embeddings."""

    size: int = -1
    """The size of the cache; -1: not known."""
    shared: bool = True
    """Whether outputs stay for later requests."""
    loads: bool = False
    """Whether a connector may load outputs."""
    entries: dict[int, int] = {}
    """Embeddings of each cached output; -1: not known."""
    at_workers: dict[int, None] = {}
    """The outputs that workers have, or may have."""
    readers: dict[int, dict[int, None]] = {}
    """Numbers of the requests that have read an output, by identity."""
    budget_differs: bool = False
    """Whether the engine's count of free embeddings differed when it was last seen."""
    evictable_differs: bool = False
    """Whether its count of free and evictable embeddings differed at the last census."""

    def forget(self) -> None:
        """Events were lost: what the cache holds is not known until the next segment."""
        self.size = -1
        self.clear()

    def clear(self) -> None:
        """The cache is empty."""
        self.entries, self.at_workers, self.readers = {}, {}, {}

    def used(self) -> int | None:
        """Embeddings of all entries; None: not known."""
        sizes = self.entries.values()
        return None if -1 in sizes else sum(sizes)


# --- transfer fingerprint state ------------------------------------------------------------------------
#
# What the ledger keeps of the transfers of blocks: fingerprints that were stored, and loads to be judged.


STORED_DIGITS_KEPT = 64 << 20
"""The most digits of stored fingerprints that are kept; the oldest are dropped first."""

VERSIONS_KEPT = 4
"""How many different fingerprints of one hash are kept: each computation of a prefix differs in bits."""


Stored = tuple[str, int, int, str]
"""A block that was handed to the store: fingerprints, step, block, and the request that had filled it."""


class ForeignLoad(NamedTuple):
    """A block that a load has filled, and that another engine may have stored.

    ``reader``: the request for which it was loaded. ``counted_as``: the count that it is part of.
    """

    hash_id: int
    worker: int
    group: int
    pool: int
    block: int
    step: int
    at: int
    reader: str
    prints: str
    counted_as: str


class CustodyState(msgspec.Struct):
    """Transfers of one engine's blocks, by block hash. All attributes are plain data."""

    key_name: str = ""
    """The function and key of the fingerprints; others can't be compared."""
    stored: dict[tuple[int, int, int], list[Stored]] = {}
    """By hash id, worker and group: what was handed to the store. Fingerprints are hexadecimal digits."""
    digits: int = 0
    """Digits of these fingerprints."""
    waiting: dict[tuple[int, int, int], list[tuple[int, int, int, bool, bool, str]]] = {}
    """By pool, block and worker: transfers of a block without a hash: step of the block's allocation,
    group, step of the transfer, whether it was stored, whether the store is the engine's own,
    fingerprints."""
    fleet_store: bool = False
    """Whether nothing but engines with the same key writes to the store."""
    foreign: list[tuple[int, int, int, int, int, int, int, str, str, str]] = []
    """Loads to be compared with what other engines stored, each a :class:`ForeignLoad`; only with
    ``fleet_store``."""
    foreign_digits: int = 0
    """Digits of their fingerprints."""

    def keep(self, key: tuple[int, int, int], stored: Stored) -> None:
        """Keep what is known of a block that was handed to the store."""
        versions = self.stored.setdefault(key, [])
        if any(stored[0] == version[0] for version in versions):
            return
        versions.append(stored)
        self.digits += len(stored[0])
        if len(versions) > VERSIONS_KEPT:
            self.digits -= len(versions.pop(0)[0])
        while self.digits > STORED_DIGITS_KEPT:
            oldest = take_oldest(self.stored)
            self.digits -= sum(len(version[0]) for versions in oldest for version in versions)

    def keep_foreign(self, load: ForeignLoad) -> None:
        """Keep a load, as long as there is room; a load without room stays uncompared."""
        if self.foreign_digits + len(load.prints) <= STORED_DIGITS_KEPT:
            self.foreign.append((*load,))
            self.foreign_digits += len(load.prints)

    def use_key(self, name: str) -> None:
        """Fingerprints of another key follow: forget all others."""
        if name != self.key_name:
            self.key_name, self.digits = name, 0
            self.stored.clear()
            self.waiting.clear()
            self.foreign, self.foreign_digits = [], 0


# --- ledger state --------------------------------------------------------------------------------------
#
# The state of a ledger: open accounts, undelivered steps, open transfers.
#
# Plain data that the posting functions share and a checkpoint saves. The functions are in the other files of
# this folder.


ScheduledRow = tuple[Account, int, int]
"""One request's part of a step: account, scheduled tokens, draft tokens among them."""

Watch = Callable[[str], bool]
"""Whether the statement lines of a request id are kept."""

Counted = Callable[[Account], bool]
"""Whether an ended request is added to the sums."""


class LedgerState(msgspec.Struct, dict=True, eq=False):
    """What a ledger holds of one engine. Times are microseconds since the engine started.

    The fields decide how the next event is posted, and a checkpoint saves them. What the caller decides, and
    what lasts for one event, are attributes that ``__post_init__`` makes.
    """

    keep_closed: bool = False
    """Whether the accounts of ended requests are kept."""
    sums: LedgerSums = msgspec.field(default_factory=LedgerSums)
    """What was added up. The caller may take it, and put other sums in its place."""
    engine: ev.EngineStarted | None = None
    """The engine's first start event."""
    stopped: str | None = None
    """Why observation ended; None while it goes on."""
    number: int = -1
    """Number of the last event posted."""
    step: int = 0
    """The engine's step at the last event posted."""
    posted_step: int = 0
    """The last step of which is posted what it scheduled."""
    at: int = 0
    """Time of the last event posted."""
    clock: float = 0.0
    """Unix time from which times count, by the newest description of the engine."""
    living: dict[int, Account] = {}
    """Open accounts by request number. A steady account in it may lag behind (``accounts.py``)."""
    closed: dict[str, Account] = {}
    """Accounts of ended requests by request id, if they are kept."""
    lost_track: str | None = None
    """Why running requests become unknown until the next snapshot; None if they are known."""
    last_step: dict[int, ScheduledRow] = {}
    """What the last step scheduled, by request number, without the steady accounts."""
    step_clock: StepClock = msgspec.field(default_factory=StepClock)
    """How the requests of a step share its time."""
    undelivered: list[dict[int, ScheduledRow]] = []
    """What each step scheduled whose output has not come yet, oldest first."""
    scheduled_steps: int = 0
    """Steps scheduled so far."""
    delivered_steps: int = 0
    """Steps whose output has come so far."""
    failed_blocks: list[int] = []
    """Blocks that failed to load, as the output says that comes next."""
    skip_deliveries: int = 0
    """Outputs still to skip, because their steps were scheduled before the trace began."""
    steps_in_flight_known: bool = True
    """Whether the observer knows how many steps are in flight. False after a hook has failed, until a
    snapshot says that none is."""
    output_order: list[int] = []
    """Request numbers in the order of the last :class:`~kvledger.audit.events.DeliveredWhole`."""
    idle: dict[int, tuple[int, int, int]] = {}
    """Requests that the last step before the last census did not schedule, by number: their scheduled
    tokens, and the steps scheduled and the time when a census first found them so."""
    stood_still: tuple[int, int, int] = (-1, 0, 0)
    """Since when no step was scheduled: the steps until then, the time of the census that found it, and
    the calls of ``schedule`` since that scheduled nothing."""
    slots: SlotAccount = msgspec.field(default_factory=SlotAccount)
    """What the engine's token pool is used for, if it has a slot for each token."""
    no_progress: dict[int, tuple[int, int]] = {}
    """First tokens and scheduled tokens of each open request at the last census that found progress."""
    no_progress_since: tuple[int, int] = (0, 0)
    """The steps scheduled until that census, and its time."""
    steady: dict[int, Account] = {}
    """Accounts whose postings are deferred, by request number."""
    sampled_beside_drafts: int = 1
    """Tokens that the engine samples beside accepted drafts; 0 for a diffusion model."""
    output_drafts: tuple[int, int, int] = (0, 0, 0)
    """Draft tokens of the last output: proposed, padding, and accepted of both."""
    cut_drafts: int = 0
    """Accepted draft tokens of the last output that lay beyond a stop."""
    queue: QueueClock = msgspec.field(default_factory=QueueClock)
    """Why requests wait for their first admission."""
    expected_local: list[int] = msgspec.field(default_factory=lambda: [0, 0, 0])
    """Local cache lookups, queried tokens and hit tokens that the engine should count for this step."""
    expected_external: list[int] = msgspec.field(default_factory=lambda: [0, 0, 0])
    """Connector lookups, queried and hit tokens that the engine should count for this step."""
    exempt_external: list[int] = msgspec.field(default_factory=lambda: [0, 0, 0])
    """The same of this step's admissions that may not read a cache, so that no lookup should count."""
    counts_local: bool = False
    """Whether the engine counts the lookups of its own cache."""
    counts_external: bool = False
    """Whether the engine counts the lookups of the connector."""
    prefix_caching: bool = True
    """Whether the engine has a prefix cache of its own."""
    lookups_unsure: bool = False
    """Whether the expected lookup counts of this step may be incomplete."""
    reported_admission: str = "first"
    """Whose hits the engine reports: of the ``first`` admission, the ``last``, or ``mixed``."""
    weights: Weights = msgspec.field(default_factory=Weights)
    """The versions of the weights."""
    blocks: BlockLedger = msgspec.field(default_factory=BlockLedger)
    """The ledger of blocks."""
    encoder: EncoderCache = msgspec.field(default_factory=EncoderCache)
    """The encoder cache."""
    contents: ContentState = msgspec.field(default_factory=ContentState)
    """What workers found out about the contents of blocks."""
    custody: CustodyState = msgspec.field(default_factory=CustodyState)
    """Transfers of blocks between the engine and a connector's store."""
    sketches: SketchState = msgspec.field(default_factory=SketchState)
    """Blocks that were computed more than once."""
    transfers: WorkerTransfers = msgspec.field(default_factory=WorkerTransfers)
    """Promised blocks, and what workers did to load them."""
    delayed_frees: dict[int, tuple[int, str, int]] = {}
    """Ended requests whose blocks a connector keeps: since when, request id, number of blocks."""
    last_ended: tuple[int, int, int, int] | None = None
    """The request that ended last: its number, its computed tokens by the engine and by the account, and
    how many of them an asynchronous load was still to bring. None if the account is unknown."""
    finished_transfers: dict[str, None] = {}
    """Ids of the requests whose transfers the workers last reported as finished."""

    def __post_init__(self) -> None:
        self.watch: Watch | None = None
        """Selects the requests whose statement lines are kept; None selects no request."""
        self.counted: Counted | None = None
        """Selects the ended requests that are added to the sums; None selects every request."""
        self.wanted: Container[type] | None = None
        """The types of events of which somebody checks the entries; None: of all."""
        self.entries: list[Entry] = []
        """Entries of the event that is being posted."""
        self.blocks.weights = self.weights

    def is_counted(self, account: Account) -> bool:
        """Whether the account of an ended request is added to the sums."""
        return self.counted is None or self.counted(account)
