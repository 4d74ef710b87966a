"""The account of one request: its lives (``life.py``), its figures and its balances.

Accounts are mutable, for the ledger's hot loop alone; what leaves the ledger is frozen (``statements.py``).
The posting functions write accounts; nothing here posts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from .. import causes
from ..events import RequestLabels
from .encoder_cache import EncoderInput
from .life import InFlight, Life, life_statement
from .position_ranges import Losses, PositionRanges
from .statements import AccountStatement, CachedRange, GroupBlock, Line, Settlement
from .tiers import tokens_by_tier
from .weights import Sampled


class Account:
    """Everything the ledger holds of one request. Only the ledger writes it.

    Counts are tokens; times are microseconds since the engine started.
    """

    __slots__ = (
        "added_at",
        "admissions",
        "asked_from",
        "cached_before",
        "cached_in_group",
        "carried",
        "closed_at",
        "computed",
        "decode_parts",
        "discarded",
        "drafted",
        "encoder_cached",
        "encoder_computed",
        "encoder_inputs",
        "encoder_read",
        "executed_again",
        "executed_first",
        "first_output",
        "first_prompt",
        "first_token",
        "hit_again",
        "in_flight",
        "in_flight_tokens",
        "incomplete",
        "invalid_hits",
        "labelled",
        "labels",
        "later_tokens",
        "life",
        "lines",
        "lives",
        "loaded",
        "loaded_again",
        "looked_up_local",
        "looked_up_step",
        "losses",
        "max_tokens",
        "more_blocks_percent",
        "older_hits",
        "older_loads",
        "older_prompt",
        "outcome",
        "output_time",
        "outputs",
        "overrun",
        "plan",
        "pooling",
        "positions",
        "preemptions",
        "prefill_parts",
        "priority",
        "promised",
        "prompt_tokens",
        "queued",
        "reads_cache",
        "rejected",
        "remote_decode",
        "remote_request",
        "reported",
        "reporting",
        "reports",
        "request",
        "request_id",
        "resumable",
        "rework",
        "sampled",
        "sampled_by",
        "sampled_misses",
        "saved_tokens",
        "scheduled",
        "sequence_tokens",
        "settled",
        "settlements",
        "stale_drafts",
        "steady_delivered",
        "steady_scheduled",
        "suspect_outputs",
        "suspense",
        "tiered",
        "traceparent",
        "transferred",
        "unknown",
        "voided",
        "waited_by_cause",
    )

    def __init__(self, request: int, request_id: str, prompt_tokens: int, at: int) -> None:
        self.request = request
        """The request's number."""
        self.request_id = request_id
        """The request's id, as the engine has it."""
        self.prompt_tokens = prompt_tokens
        """Length of the prompt; of a session, up to its last chunk."""
        self.sequence_tokens = prompt_tokens
        """Prompt and output tokens so far."""
        self.carried = 0
        """Tokens that a session's present chunk keeps from before."""
        self.added_at = at
        """Time when the request came."""
        self.closed_at = -1
        """Time of the end; -1 while the account is open."""
        self.outcome = ""
        """Why the request ended; empty while the account is open."""
        self.unknown: str | None = None
        """Why the account is unknown; None if it is known."""
        self.pooling = False
        """Whether the request is for a pooling model."""
        self.resumable = False
        """Whether the request is a streaming-input session."""
        self.reads_cache = True
        """Whether the request may hit the prefix cache."""
        self.max_tokens: int | None = None
        """Most output tokens that the client asked for; None: not known."""
        self.priority = 0
        """Priority of the request; a lower number is more urgent."""
        self.labels: RequestLabels | None = None
        """Whom the request is for; None: it has no labels, or they were not recorded."""
        self.traceparent: str | None = None
        """The caller's W3C trace context."""
        self.transferred = False
        """Whether a prefill engine hands over the KV, so external tokens are no cache hits."""
        self.remote_decode = False
        """Whether this engine only prefills the request, and another one decodes."""
        self.remote_request = ""
        """Id of the request in the prefill engine; empty if not known."""

        self.positions = PositionRanges()
        """The origin of each position's KV."""
        self.losses = Losses()
        """The cause for which each position last lost its KV."""
        self.life: Life | None = None
        """The present life; None while the request waits."""
        self.lives: list[Life] = []
        """All lives, oldest first."""
        self.computed = 0
        """Computed tokens of the present life, counted at scheduling as vLLM does."""
        self.in_flight: deque[InFlight] = deque()
        """Scheduled tokens whose output has not come, oldest step first."""
        self.in_flight_tokens = 0
        """Sum of the tokens in flight."""
        self.sampled = 0
        """Tokens sampled by the last output."""
        self.drafted = False
        """Whether drafts were ever scheduled."""
        self.stale_drafts = 0
        """Drafts of ended lives that were rejected in the present life."""

        self.scheduled = 0
        """Tokens scheduled in all lives."""
        self.first_prompt = 0
        """Prompt tokens computed for the first time."""
        self.first_output = 0
        """Output tokens computed for the first time."""
        self.rework: dict[str, int] = {}
        """Tokens computed again, by the cause for which their KV was lost."""
        self.rejected = 0
        """Draft tokens rejected."""
        self.overrun = 0
        """Tokens that were in flight when the request stopped, or accepted past the stop."""
        self.suspense = 0
        """Tokens whose work could not be attributed."""
        self.executed_first: list[tuple[int, int, int]] = []
        """Prompt positions computed for the first time: start, end, number of the life."""
        self.executed_again: list[tuple[int, int, str]] = []
        """Prompt positions computed again: start, end, cause."""
        self.invalid_hits: list[tuple[int, int]] = []
        """Positions of local hits on cached blocks without valid KV: start, end."""
        self.cached_before: list[CachedRange] = []
        """Prompt positions that block events prove to have been in the cache before."""
        self.cached_in_group: list[GroupBlock] = []
        """The same of blocks of groups of windows and states."""

        self.settled = False
        """Whether the present prompt or chunk is settled."""
        self.incomplete = False
        """Whether the first output came before every token of the present prompt or chunk had valid KV."""
        self.settlements: list[Settlement] = []
        """One settlement for the prompt, or for each chunk of a session."""
        self.prefill_parts: tuple[int, int] | None = None
        """Microseconds of the cause ``prefill``: the request's own share of its steps, and the rest."""
        self.decode_parts: tuple[int, int] | None = None
        """The same of the cause ``decode``."""
        self.output_time: tuple[int, ...] | None = None
        """Microseconds from the first output to the last, by cause (``token_times.py``); None: not known."""
        self.later_tokens = 0
        """Output tokens after the first one, which came in that time."""
        self.first_token: tuple[int, ...] | None = None
        """Microseconds to the first output, by cause (``token_times.py``); of a session, of its first turn.
        None: there was no output, or the request is for a pooling model."""
        self.waited_by_cause: tuple[int, ...] | None = None
        """Microseconds to the first admission, by cause (``queue_clock.py``); None: there was none."""
        self.queued: tuple[int, ...] | None = None
        """The same of a request with a first output, whose time it is a part of."""
        self.plan: tuple[int, int] | None = None
        """Planned split: local and external hits of the first admission that ran."""
        self.reported: tuple[int, int, int] | None = None
        """Local, external and computed tokens of the engine's first report."""
        self.reports = 0
        """Reports of the engine for the present prompt or chunk."""
        self.reporting: Life | None = None
        """The life whose hits the engine reports: by release, the first that ran or the last before the
        first output."""
        self.hit_again = 0
        """Repeat hits: local hits over positions that had KV before."""
        self.loaded_again = 0
        """Repeat loads: loaded tokens over positions that had KV before."""
        self.promised = 0
        """External tokens promised in all lives."""
        self.loaded = 0
        """External tokens loaded in all lives."""
        self.voided: dict[str, int] = {}
        """External tokens that failed or were cancelled, by cause."""
        self.tiered = False
        """Whether the connector reported the tiers of any life's external tokens."""
        self.sampled_misses: dict[str, int] = {}
        """Of one in sixteen contents, blocks that the first hit did not cover, by what became of each."""
        self.outputs = 0
        """Output tokens of the turns of a session that have ended, and of a request that has."""
        self.suspect_outputs: dict[str, int] = {}
        """Those of them whose step read KV of older weights, by how much older."""
        self.sampled_by: list[Sampled] = []
        """Under which weights the outputs were sampled, by position; empty: before the first change."""
        self.labelled: list[tuple[int, str]] = []
        """From which position on the engine's output calls the weights so; empty: the label stayed."""
        self.older_hits: dict[str, int] = {}
        """Local hits of all lives on KV of older weights, by how much older."""
        self.older_loads: dict[str, int] = {}
        """External tokens promised in all lives with KV of older weights, by how much older."""
        self.older_prompt: dict[str, int] = {}
        """Settled prompt tokens with KV of older weights, by how much older."""
        self.discarded: dict[str, int] = {}
        """Computed tokens at the end of each life, by the cause of the end."""
        self.encoder_inputs: list[EncoderInput] = []
        """The encoder inputs, once an event has spoken of one."""
        self.encoder_read: dict[int, int] = {}
        """The inputs that were read, by their index, and in which life."""
        self.encoder_computed = 0
        """Encoder embeddings that steps computed for the request."""
        self.encoder_cached = 0
        """Encoder embeddings that the encoder cache had when the request first read them, in each life."""
        self.saved_tokens = 0
        """End of the last positions that an observed order of the connector saves."""

        self.admissions = 0
        """Lives begun."""
        self.preemptions = 0
        """Preemptions."""
        self.looked_up_step = -1
        """Step of the last local cache lookup; -1: none was seen."""
        self.looked_up_local = 0
        """Tokens that the last local cache lookup hit."""
        self.asked_from = -1
        """The local hit beyond which the connector was asked since the last lookup; -1: it was not asked."""
        self.more_blocks_percent = -1
        """How many percent more blocks would have avoided every preemption for lack of free blocks, rounded
        up; -1: there was none, or it is not known."""
        self.lines: list[Line] | None = None
        """Lines of the account statement; None: not kept."""
        self.steady_scheduled = -1
        """Scheduled steps up to which a steady account is posted; -1: the account is not steady."""
        self.steady_delivered = -1
        """Delivered steps up to which a steady account is posted; -1: the account is not steady."""

    @property
    def promised_by_tier(self) -> dict[str, int]:
        """External tokens promised, by tier, of the lives whose tiers were reported; so the next three."""
        return tokens_by_tier(self.lives, "external") if self.tiered else {}

    @property
    def loaded_by_tier(self) -> dict[str, int]:
        """External tokens loaded, by tier."""
        return tokens_by_tier(self.lives, "loaded") if self.tiered else {}

    @property
    def voided_by_tier(self) -> dict[str, int]:
        """External tokens that failed or were cancelled, by tier."""
        return tokens_by_tier(self.lives, "lost_external") if self.tiered else {}

    @property
    def loaded_again_by_tier(self) -> dict[str, int]:
        """Repeat loads, by tier."""
        return tokens_by_tier(self.lives, "loaded_again") if self.tiered else {}

    def waits(self, until: int) -> Iterator[tuple[int, int]]:
        """Start and end of every time that the request spent without a life.

        ``until`` ends the last wait of an open account. Microseconds since the engine started.
        """
        since, end = self.added_at, self.closed_at if self.closed_at >= 0 else until
        for life in self.lives:
            if life.began_at > since:
                yield since, life.began_at
            since = life.ended_at if life.ended_at >= 0 else end
        if end > since:
            yield since, end

    def waited(self, until: int) -> int:
        """Total waiting time in microseconds."""
        waited = 0
        for start, end in self.waits(until):
            waited += end - start
        return waited

    def freeze(self) -> AccountStatement:
        """The account as it stands now."""
        return AccountStatement(
            request=self.request,
            request_id=self.request_id,
            prompt_tokens=self.prompt_tokens,
            sequence_tokens=self.sequence_tokens,
            added_at=self.added_at,
            closed_at=self.closed_at,
            outcome=self.outcome,
            unknown=self.unknown,
            preemptions=self.preemptions,
            computed=self.computed,
            in_flight=self.in_flight_tokens,
            scheduled=self.scheduled,
            first_prompt=self.first_prompt,
            first_output=self.first_output,
            rework=dict(self.rework),
            rejected=self.rejected,
            overrun=self.overrun,
            settlements=list(self.settlements),
            plan=self.plan,
            reported=self.reported,
            hit_again=self.hit_again,
            loaded_again=self.loaded_again,
            promised=self.promised,
            loaded=self.loaded,
            voided=dict(self.voided),
            discarded=dict(self.discarded),
            suspense=self.suspense,
            lives=[life_statement(life) for life in self.lives],
            traceparent=self.traceparent,
            transferred=self.transferred,
            remote_decode=self.remote_decode,
            remote_request=self.remote_request,
            first_token=_named(causes.FIRST_TOKEN, self.first_token),
            queued=_named(causes.QUEUE, self.queued),
            output_time=_named(causes.OUTPUT_TIME, self.output_time),
            later_tokens=self.later_tokens,
        )


def _named(names: Iterable[str], spent: tuple[int, ...] | None) -> dict[str, int] | None:
    """Microseconds by cause."""
    return None if spent is None else dict(zip(names, spent, strict=True))
