"""The account of one request: its lives (``life.py``), its figures and its balances.

Accounts are mutable, for the ledger's hot loop alone; what leaves the ledger is frozen (``statements.py``).
The posting functions write accounts; nothing here posts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from .. import causes
from ..events import RequestLabels
from .encoder_cache import EncoderInput
from .life import InFlight, Life, life_statement
from .position_ranges import Losses, PositionRanges
from .statements import AccountStatement, CachedRange, GroupBlock, Line, Settlement
from .tiers import tokens_by_tier
from .weights import Sampled


class Account(msgspec.Struct, eq=False):
    """Everything the ledger holds of one request. Only the ledger writes it.

    Counts are tokens; times are microseconds since the engine started.
    """

    request: int
    """The request's number."""
    request_id: str
    """The request's id, as the engine has it."""
    prompt_tokens: int
    """Length of the prompt; of a session, up to its last chunk."""
    added_at: int
    """Time when the request came."""
    sequence_tokens: int = 0
    """Prompt and output tokens so far."""
    carried: int = 0
    """Tokens that a session's present chunk keeps from before."""
    closed_at: int = -1
    """Time of the end; -1 while the account is open."""
    outcome: str = ""
    """Why the request ended; empty while the account is open."""
    unknown: str | None = None
    """Why the account is unknown; None if it is known."""
    pooling: bool = False
    """Whether the request is for a pooling model."""
    resumable: bool = False
    """Whether the request is a streaming-input session."""
    reads_cache: bool = True
    """Whether the request may hit the prefix cache."""
    max_tokens: int | None = None
    """Most output tokens that the client asked for; None: not known."""
    priority: int = 0
    """Priority of the request; a lower number is more urgent."""
    labels: RequestLabels | None = None
    """Whom the request is for; None: it has no labels, or they were not recorded."""
    traceparent: str | None = None
    """The caller's W3C trace context."""
    transferred: bool = False
    """Whether a prefill engine hands over the KV, so external tokens are no cache hits."""
    remote_decode: bool = False
    """Whether this engine only prefills the request, and another one decodes."""
    remote_request: str = ""
    """Id of the request in the prefill engine; empty if not known."""
    positions: PositionRanges = msgspec.field(default_factory=PositionRanges)
    """The origin of each position's KV."""
    losses: Losses = msgspec.field(default_factory=Losses)
    """The cause for which each position last lost its KV."""
    life: Life | None = None
    """The present life; None while the request waits."""
    lives: list[Life] = []
    """All lives, oldest first."""
    computed: int = 0
    """Computed tokens of the present life, counted at scheduling as vLLM does."""
    in_flight: deque[InFlight] = msgspec.field(default_factory=deque)
    """Scheduled tokens whose output has not come, oldest step first."""
    in_flight_tokens: int = 0
    """Sum of the tokens in flight."""
    sampled: int = 0
    """Tokens sampled by the last output."""
    drafted: bool = False
    """Whether drafts were ever scheduled."""
    stale_drafts: int = 0
    """Drafts of ended lives that were rejected in the present life."""
    scheduled: int = 0
    """Tokens scheduled in all lives."""
    first_prompt: int = 0
    """Prompt tokens computed for the first time."""
    first_output: int = 0
    """Output tokens computed for the first time."""
    rework: dict[str, int] = {}
    """Tokens computed again, by the cause for which their KV was lost."""
    rejected: int = 0
    """Draft tokens rejected."""
    overrun: int = 0
    """Tokens that were in flight when the request stopped, or accepted past the stop."""
    suspense: int = 0
    """Tokens whose work could not be attributed."""
    executed_first: list[tuple[int, int, int]] = []
    """Prompt positions computed for the first time: start, end, number of the life."""
    executed_again: list[tuple[int, int, str]] = []
    """Prompt positions computed again: start, end, cause."""
    invalid_hits: list[tuple[int, int]] = []
    """Positions of local hits on cached blocks without valid KV: start, end."""
    cached_before: list[CachedRange] = []
    """Prompt positions that block events prove to have been in the cache before."""
    cached_in_group: list[GroupBlock] = []
    """The same of blocks of groups of windows and states."""
    settled: bool = False
    """Whether the present prompt or chunk is settled."""
    incomplete: bool = False
    """Whether the first output came before every token of the present prompt or chunk had valid KV."""
    settlements: list[Settlement] = []
    """One settlement for the prompt, or for each chunk of a session."""
    prefill_parts: tuple[int, int] | None = None
    """Microseconds of the cause ``prefill``: the request's own share of its steps, and the rest."""
    decode_parts: tuple[int, int] | None = None
    """The same of the cause ``decode``."""
    output_time: tuple[int, ...] | None = None
    """Microseconds from the first output to the last, by cause (``token_times.py``); None: not known."""
    later_tokens: int = 0
    """Output tokens after the first one, which came in that time."""
    first_token: tuple[int, ...] | None = None
    """Microseconds to the first output, by cause (``token_times.py``); of a session, of its first turn.
    None: there was no output, or the request is for a pooling model."""
    waited_by_cause: tuple[int, ...] | None = None
    """Microseconds to the first admission, by cause (``queue_clock.py``); None: there was none."""
    queued: tuple[int, ...] | None = None
    """The same of a request with a first output, whose time it is a part of."""
    plan: tuple[int, int] | None = None
    """Planned split: local and external hits of the first admission that ran."""
    reported: tuple[int, int, int] | None = None
    """Local, external and computed tokens of the engine's first report."""
    reports: int = 0
    """Reports of the engine for the present prompt or chunk."""
    reporting: Life | None = None
    """The life whose hits the engine reports: by release, the first that ran or the last before the
    first output."""
    hit_again: int = 0
    """Repeat hits: local hits over positions that had KV before."""
    loaded_again: int = 0
    """Repeat loads: loaded tokens over positions that had KV before."""
    promised: int = 0
    """External tokens promised in all lives."""
    loaded: int = 0
    """External tokens loaded in all lives."""
    voided: dict[str, int] = {}
    """External tokens that failed or were cancelled, by cause."""
    tiered: bool = False
    """Whether the connector reported the tiers of any life's external tokens."""
    sampled_misses: dict[str, int] = {}
    """Of one in sixteen contents, blocks that the first hit did not cover, by what became of each."""
    outputs: int = 0
    """Output tokens of the turns of a session that have ended, and of a request that has."""
    suspect_outputs: dict[str, int] = {}
    """Those of them whose step read KV of older weights, by how much older."""
    sampled_by: list[Sampled] = []
    """Under which weights the outputs were sampled, by position; empty: before the first change."""
    labelled: list[tuple[int, str]] = []
    """From which position on the engine's output calls the weights so; empty: the label stayed."""
    older_hits: dict[str, int] = {}
    """Local hits of all lives on KV of older weights, by how much older."""
    older_loads: dict[str, int] = {}
    """External tokens promised in all lives with KV of older weights, by how much older."""
    older_prompt: dict[str, int] = {}
    """Settled prompt tokens with KV of older weights, by how much older."""
    discarded: dict[str, int] = {}
    """Computed tokens at the end of each life, by the cause of the end."""
    encoder_inputs: list[EncoderInput] = []
    """The encoder inputs, once an event has spoken of one."""
    encoder_read: dict[int, int] = {}
    """The inputs that were read, by their index, and in which life."""
    encoder_computed: int = 0
    """Encoder embeddings that steps computed for the request."""
    encoder_cached: int = 0
    """Encoder embeddings that the encoder cache had when the request first read them, in each life."""
    saved_tokens: int = 0
    """End of the last positions that an observed order of the connector saves."""
    admissions: int = 0
    """Lives begun."""
    preemptions: int = 0
    """Preemptions."""
    looked_up_step: int = -1
    """Step of the last local cache lookup; -1: none was seen."""
    looked_up_local: int = 0
    """Tokens that the last local cache lookup hit."""
    asked_from: int = -1
    """The local hit beyond which the connector was asked since the last lookup; -1: it was not asked."""
    more_blocks_percent: int = -1
    """How many percent more blocks would have avoided every preemption for lack of free blocks, rounded
    up; -1: there was none, or it is not known."""
    lines: list[Line] | None = None
    """Lines of the account statement; None: not kept."""
    steady_scheduled: int = -1
    """Scheduled steps up to which a steady account is posted; -1: the account is not steady."""
    steady_delivered: int = -1
    """Delivered steps up to which a steady account is posted; -1: the account is not steady."""

    def __post_init__(self) -> None:
        self.sequence_tokens = self.prompt_tokens

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
