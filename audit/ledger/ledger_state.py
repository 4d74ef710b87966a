"""The state of a ledger: open accounts, undelivered steps, open transfers. Its sums are in ``sums.py``.

Plain data that the posting functions share and a checkpoint saves. The functions are in the other files
of this folder.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container

from .. import events as ev
from .account import Account
from .blocks.ledger import BlockLedger
from .content_state import ContentState
from .encoder_cache import EncoderCache
from .entries import Entry
from .queue_clock import QueueClock
from .sketch_state import SketchState
from .step_clock import StepClock
from .sums import LedgerSums
from .transfer_fingerprint_state import CustodyState
from .transfers import WorkerTransfers
from .weights import Weights

ScheduledRow = tuple[Account, int, int]
"""One request's part of a step: account, scheduled tokens, draft tokens among them."""

Watch = Callable[[str], bool]
"""Whether the statement lines of a request id are kept."""

Counted = Callable[[Account], bool]
"""Whether an ended request is added to the sums."""


class LedgerState:
    """What a ledger holds of one engine. Times are microseconds since the engine started."""

    def __init__(
        self, *, keep_closed: bool = False, watch: Watch | None = None, counted: Counted | None = None
    ) -> None:
        self.keep_closed = keep_closed
        """Whether the accounts of ended requests are kept."""
        self.watch = watch
        """Selects the requests whose statement lines are kept; None selects no request."""
        self.counted = counted
        """Selects the ended requests that are added to the sums; None selects every request."""
        self.sums = LedgerSums()
        """What was added up. The caller may take it, and put other sums in its place."""
        self.engine: ev.EngineStarted | None = None
        """The engine's first start event."""
        self.stopped: str | None = None
        """Why observation ended; None while it goes on."""
        self.number = -1
        """Number of the last event posted."""
        self.step = 0
        """The engine's step at the last event posted."""
        self.posted_step = 0
        """The last step of which is posted what it scheduled."""
        self.at = 0
        """Time of the last event posted."""
        self.wanted: Container[type] | None = None
        """The types of events of which somebody checks the entries; None: of all."""
        self.entries: list[Entry] = []
        """Entries of the event that is being posted."""

        self.clock = 0.0
        """Unix time from which times count, by the newest description of the engine."""
        self.living: dict[int, Account] = {}
        """Open accounts by request number. A steady account in it may lag behind (``unchanged_steps.py``)."""
        self.closed: dict[str, Account] = {}
        """Accounts of ended requests by request id, if they are kept."""
        self.lost_track: str | None = None
        """Why running requests become unknown until the next snapshot; None if they are known."""

        self.last_step: dict[int, ScheduledRow] = {}
        """What the last step scheduled, by request number, without the steady accounts."""
        self.step_clock = StepClock()
        """How the requests of a step share its time."""
        self.undelivered: deque[dict[int, ScheduledRow]] = deque()
        """What each step scheduled whose output has not come yet, oldest first."""
        self.scheduled_steps = 0
        """Steps scheduled so far."""
        self.delivered_steps = 0
        """Steps whose output has come so far."""
        self.failed_blocks: list[int] = []
        """Blocks that failed to load, as the output says that comes next."""
        self.skip_deliveries = 0
        """Outputs still to skip, because their steps were scheduled before the trace began."""
        self.steps_in_flight_known = True
        """Whether the observer knows how many steps are in flight. False after a hook has failed, until a
        snapshot says that none is."""
        self.output_order: list[int] = []
        """Request numbers in the order of the last :class:`~kvledger.audit.events.DeliveredWhole`."""
        self.idle: dict[int, tuple[int, int, int]] = {}
        """Requests that the last step before the last census did not schedule, by number: their scheduled
        tokens, and the steps scheduled and the time when a census first found them so."""
        self.stood_still = -1, 0, 0
        """Since when no step was scheduled: the steps until then, the time of the census that found it, and
        the calls of ``schedule`` since that scheduled nothing."""
        self.no_progress: dict[int, tuple[int, int]] = {}
        """First tokens and scheduled tokens of each open request at the last census that found progress."""
        self.no_progress_since = 0, 0
        """The steps scheduled until that census, and its time."""
        self.steady: dict[int, Account] = {}
        """Accounts whose postings are deferred, by request number."""
        self.sampled_beside_drafts = 1
        """Tokens that the engine samples beside accepted drafts; 0 for a diffusion model."""

        self.output_drafts = (0, 0, 0)
        """Draft tokens of the last output: proposed, padding, and accepted of both."""
        self.cut_drafts = 0
        """Accepted draft tokens of the last output that lay beyond a stop."""

        self.queue = QueueClock()
        """Why requests wait for their first admission."""
        self.expected_local = [0, 0, 0]
        """Local cache lookups, queried tokens and hit tokens that the engine should count for this step."""
        self.expected_external = [0, 0, 0]
        """Connector lookups, queried and hit tokens that the engine should count for this step."""
        self.exempt_external = [0, 0, 0]
        """The same of this step's admissions that may not read a cache, so that no lookup should count."""
        self.counts_local = False
        """Whether the engine counts the lookups of its own cache."""
        self.counts_external = False
        """Whether the engine counts the lookups of the connector."""
        self.prefix_caching = True
        """Whether the engine has a prefix cache of its own."""
        self.lookups_unsure = False
        """Whether the expected lookup counts of this step may be incomplete."""
        self.reported_admission = "first"
        """Whose hits the engine reports: of the ``first`` admission, the ``last``, or ``mixed``."""

        self.weights = Weights()
        """The versions of the weights."""
        self.blocks = BlockLedger(self.weights)
        """The ledger of blocks."""
        self.encoder = EncoderCache()
        """The encoder cache."""
        self.contents = ContentState()
        """What workers found out about the contents of blocks."""
        self.custody = CustodyState()
        """Transfers of blocks between the engine and a connector's store."""
        self.sketches = SketchState()
        """Blocks that were computed more than once."""
        self.transfers = WorkerTransfers()
        """Promised blocks, and what workers did to load them."""
        self.delayed_frees: dict[int, tuple[int, str, int]] = {}
        """Ended requests whose blocks a connector keeps: since when, request id, number of blocks."""
        self.last_ended: tuple[int, int, int, int] | None = None
        """The request that ended last: its number, its computed tokens by the engine and by the account, and
        how many of them an asynchronous load was still to bring. None if the account is unknown."""
        self.finished_transfers: dict[str, None] = {}
        """Ids of the requests whose transfers the workers last reported as finished."""

    def is_counted(self, account: Account) -> bool:
        """Whether the account of an ended request is added to the sums."""
        return self.counted is None or self.counted(account)
