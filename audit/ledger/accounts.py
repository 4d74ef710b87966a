"""What postings share: accounts are opened, found, caught up and closed, and executed tokens are counted."""

from __future__ import annotations

import re

from .. import causes
from .. import events as ev
from ..figures.sums import add_tokens
from .account import COMPUTED, EXTERNAL, LOCAL, UNATTAINED, Account, InFlight, Life, Line, Settlement
from .blocks.pool import usable, used
from .entries import (
    BlockFinding,
    CountedDrafts,
    Entry,
    MiscountedLookups,
    PromptUnreported,
    ReportedCounts,
    SiblingAdded,
)
from .ledger_state import LedgerState, ScheduledRow
from .weights import adapter_of, extend, is_noted, settle_weights

# --- unchanged steps -----------------------------------------------------------------------------------
#
# Deferred postings of steady accounts.
#
# A request that only decodes adds one token to every balance in each step, and most requests of most steps
# do. Such an account is *steady*: steps and outputs are counted once for all steady accounts, and a steady
# account is posted when an event names its request or somebody reads the account.


def is_steady(state: LedgerState, account: Account) -> bool:
    """Whether each further step and output adds one token, until an event names the request."""
    life, row = account.life, state.last_step.get(account.request)
    if life is None or row is None or row[1] != 1 or row[2] or account.lines is not None:
        return False
    flights, rows = account.in_flight, account.positions.ranges
    if len(flights) != len(state.undelivered) or not rows or life.pending:
        return False
    at = rows[-1].end
    for place, flight in enumerate(flights):
        plain = flight.life is life and flight.tokens == 1 and not flight.drafts and flight.weights is None
        if not plain or flight.overrun or flight.invalid_from >= 0 or flight.start != at + place:
            return False
    if state.weights.stage and not is_noted(state.weights, account):
        return False
    last = rows[-1]
    return (
        at >= account.prompt_tokens
        and last.source == COMPUTED
        and last.life == life.number
        and account.computed == at + len(flights)
    )


def make_steady(state: LedgerState, account: Account) -> None:
    """Defer the account's postings from here on."""
    account.steady_scheduled = state.scheduled_steps
    account.steady_delivered = state.delivered_steps
    state.steady[account.request] = account
    del state.last_step[account.request]


def activate(state: LedgerState, account: Account) -> None:
    """Post the account step by step from here on, beginning with the steps in flight."""
    catch_up(state, account)
    account.steady_scheduled = account.steady_delivered = -1
    request = account.request
    del state.steady[request]
    row: ScheduledRow = (account, 1, 0)
    state.last_step[request] = row
    for roster in state.undelivered:
        roster[request] = row


def activate_all(state: LedgerState) -> None:
    """Activate every steady account."""
    for account in list(state.steady.values()):
        activate(state, account)


def catch_up(state: LedgerState, account: Account) -> None:
    """Post the steps and outputs since the account was last posted."""
    scheduled = state.scheduled_steps - account.steady_scheduled
    delivered = state.delivered_steps - account.steady_delivered
    if not (scheduled or delivered):
        return
    account.steady_scheduled, account.steady_delivered = state.scheduled_steps, state.delivered_steps
    life, flights = account.life, account.in_flight
    assert life is not None
    account.computed += scheduled
    account.scheduled += scheduled
    life.scheduled += scheduled
    account.in_flight_tokens += scheduled - delivered
    account.sequence_tokens += delivered
    account.first_output += delivered
    account.positions.ranges[-1].end += delivered
    depth = len(flights) + scheduled - delivered
    while len(flights) > depth:
        flights.pop()
    while len(flights) < depth:
        flights.append(InFlight(0, 1, 0, life))
    for start, flight in enumerate(flights, account.computed - depth):
        flight.start = start


def open_accounts(state: LedgerState) -> dict[int, Account]:
    """The open accounts by request number, all posted up to now. It takes a time for each steady account."""
    for account in state.steady.values():
        catch_up(state, account)
    return state.living


def posted(state: LedgerState, request: int) -> Account | None:
    """The open account of a request, posted up to now; None if there is none.

    An event that names a few requests posts these only, so its time does not depend on how many run.
    """
    account = state.living.get(request)
    if account is not None and account.steady_scheduled >= 0:
        catch_up(state, account)
    return account


# --- accounts ------------------------------------------------------------------------------------------
#
# What all postings share: accounts are opened, found, settled and closed, and entries are made.


def open_account(
    state: LedgerState, request: int, request_id: str, prompt_tokens: int, *, seen: bool = True
) -> Account:
    """Open an account; a request that has one already ended unseen. ``seen``: its arrival is an event."""
    if request in state.living:
        close_unseen(state, request)
    account = Account(request, request_id, prompt_tokens, state.at)
    if state.watch is not None and state.watch(request_id):
        account.lines = []
    if state.lost_track is not None:
        make_unknown(account, state.lost_track)
    state.living[request] = account
    state.queue.begin(request, state.at, seen=seen)
    return account


def find_account(state: LedgerState, request: int) -> Account | None:
    """The open account of a request, posted up to now, or None."""
    account = state.living.get(request)
    if account is not None and account.steady_scheduled >= 0:
        activate(state, account)
    return account


def see_demand(state: LedgerState) -> None:
    """Note how many blocks are needed now beside those that preempted requests held."""
    for pool in state.blocks.pools.values():
        state.blocks.demand.see(used(pool))


def end_wait(state: LedgerState, account: Account) -> None:
    """A request that may have been preempted is admitted, or ends: note how many blocks it lacked."""
    for pool in state.blocks.pools.values():
        percent = state.blocks.demand.end(account.request, usable(pool))
        account.more_blocks_percent = max(account.more_blocks_percent, percent)


def account_of(state: LedgerState, request: int) -> Account:
    """The open account of a request, posted up to now; a new unknown one if there is none."""
    account = state.living.get(request)
    if account is not None:
        if account.steady_scheduled >= 0:
            activate(state, account)
    else:
        account = open_account(state, request, f"#{request}", 0)
        make_unknown(account, "its arrival was not observed")
    return account


def close_account(state: LedgerState, request: int, account: Account) -> None:
    """Take an account out of the open ones and add it to the sums."""
    state.living.pop(request, None)
    state.queue.waiting.pop(request, None)
    state.transfers.closed(request)
    if state.is_counted(account):
        state.sums.ended.add(account)
    if state.keep_closed:
        state.closed[account.request_id] = account


def close_unseen(state: LedgerState, request: int) -> None:
    """Close the account of a request whose end was not observed."""
    account = account_of(state, request)
    make_unknown(account, causes.END_UNSEEN)
    account.outcome = causes.UNKNOWN
    account.closed_at = state.at
    close_account(state, request, account)


def make_unknown(account: Account, reason: str) -> None:
    """Mark an account as unknown, so that nothing is checked or claimed about it. The first reason stays."""
    if account.unknown is None:
        account.unknown = reason


def begin_life(state: LedgerState, account: Account, local: int, external: int) -> Life:
    """Begin a life with its local and external hits."""
    life = Life(len(account.lives) + 1, local, external, asynchronous=False)
    life.began_at, life.began_step = state.at, state.step
    if not account.lives:
        account.waited_by_cause = state.queue.end(account.request, state.at - account.added_at, state.at)
    account.life = life
    account.stale_drafts = 0
    account.lives.append(life)
    account.admissions += 1
    return life


def roll_back(
    state: LedgerState, account: Account, start: int, end: int, cause: str, alive_from: int = 0
) -> None:
    """Lower the life's computed tokens from ``end`` to ``start``. KV below ``alive_from`` is not lost."""
    tokens = end - start
    if tokens <= 0:
        return
    account.losses.add(max(start, alive_from), delivered_end(account, end), cause)
    account.computed = start
    account.encoder_read.clear()
    if account.life is not None:
        add_tokens(account.life.rolled_back, cause, tokens)
        if cause != causes.LOAD_FAILED:
            account.life.kept_end = max(account.life.kept_end, end)
        if account.life.made:
            now = state.weights.of(adapter_of(account))
            extend(account.life.made, start, now, now)  # they are computed again, under the present weights
    add_line(state, account, f"rolled back: {causes.loss(cause)}", debit=tokens)


def delivered_end(account: Account, end: int) -> int:
    """``end``, or the first position in flight in the present life: its KV does not exist yet."""
    for flight in account.in_flight:
        if flight.life is account.life and flight.invalid_from < 0:
            return min(flight.start, end)
    return end


def settle_if_attained(state: LedgerState, account: Account) -> None:
    """Settle with an output, unless a prompt token has no valid KV yet.

    Then a later output or the end of the request settles.
    """
    tally = account.positions.tally(account.carried, account.prompt_tokens)
    if tally[UNATTAINED]:
        account.incomplete = True
    else:
        _settle(state, account, tally)


def settle(state: LedgerState, account: Account) -> None:
    """Settle at the end of a request or a chunk: a token without valid KV is unattained."""
    _settle(state, account, account.positions.tally(account.carried, account.prompt_tokens))


def _settle(state: LedgerState, account: Account, tally: dict[str, int]) -> None:
    """Attribute each prompt token to its first valid origin, for good."""
    settlement = Settlement(
        prompt_tokens=account.prompt_tokens,
        carried=account.carried,
        local=tally[LOCAL],
        external=tally[EXTERNAL],
        computed=tally[COMPUTED],
        unattained=tally[UNATTAINED],
        at=state.at,
        step=state.step,
        invalid_hits=_invalid_hits(account) if account.invalid_hits else 0,
    )
    account.settled = True
    account.settlements.append(settlement)
    if state.weights.stage:
        settle_weights(state.weights, account)
    state.entries.append(Entry(state.number, state.step, state.at, settlement, account))
    if account.lines is not None:
        figures = ", ".join(f"{n} {source}" for source, n in tally.items() if n)
        hits = f" ({settlement.invalid_hits} of them invalid hits)" if settlement.invalid_hits else ""
        add_line(state, account, f"prompt settled: {figures}{hits}")


def _invalid_hits(account: Account) -> int:
    """Prompt tokens that no source gave valid KV, although the engine hit a cached block for them."""
    tokens, counted = 0, account.carried
    for start, end in sorted(account.invalid_hits):
        start, counted = max(start, counted), max(counted, min(end, account.prompt_tokens))
        if start < counted:
            tokens += account.positions.tally(start, counted)[UNATTAINED]
    return tokens


def enter(state: LedgerState, event: ev.Event, account: Account | None = None) -> None:
    """Make an entry of the event itself, if somebody checks it."""
    if state.wanted is None or type(event) in state.wanted:
        state.entries.append(Entry(state.number, state.step, state.at, event, account))


def enter_subjects(state: LedgerState, findings: list[BlockFinding], step: int) -> None:
    """Make entries of the subjects that the ledger of blocks reported."""
    for subject, request in findings:
        state.entries.append(Entry(state.number, step, state.at, subject, posted(state, request)))


def enter_computed(state: LedgerState, account: Account, instant: str, computed: int) -> None:
    """Make an entry if the computed tokens that the engine reported are not those of the account.

    Most events report this one count, and nearly all of them agree, so an entry for each would be costly.
    """
    if computed != account.computed:
        enter_reported(state, account, instant, computed, -1, -1)


def enter_reported(
    state: LedgerState,
    account: Account,
    instant: str,
    computed: int,
    in_flight: int,
    placeholders: int,
    sequence: int = -1,
) -> None:
    """Make an entry that compares the counts the engine reported with the account."""
    if account.unknown is None and computed != -1:
        subject = ReportedCounts(
            instant,
            computed,
            account.computed,
            in_flight,
            account.in_flight_tokens,
            placeholders,
            sequence,
            account.sequence_tokens,
            state.sampled_beside_drafts,
        )
        state.entries.append(Entry(state.number, state.step, state.at, subject, account))


def add_line(
    state: LedgerState, account: Account, text: str, credit: int = 0, debit: int = 0, life: int = 0
) -> None:
    """Add a line to the account statement, if one is kept."""
    if account.lines is not None:
        number = life or (account.life.number if account.life else len(account.lives))
        account.lines.append(
            Line(
                state.number,
                state.at,
                state.step,
                number,
                text,
                credit,
                debit,
                account.computed,
            )
        )


# --- executed tokens -----------------------------------------------------------------------------------
#
# Postings of executed tokens: each is first prompt, first output or rework.
#
# The tokens of a step are posted when its output is delivered. There is one exception: a new life may hit
# blocks that a step of an ended life still has in flight. The engine runs steps in order, so that step fills
# the blocks before the new life reads them, and its tokens are posted before the hit.


def execute(account: Account, life: Life, start: int, end: int) -> None:
    """Post the execution of positions [start, end)."""
    prompt = account.prompt_tokens
    rows = account.positions.ranges
    if rows and start >= prompt:
        last = rows[-1]
        if last.end == start and last.source == COMPUTED and last.life == life.number:
            last.end = end
            account.first_output += end - start
            return
    gaps = account.positions.fill(start, end, COMPUTED, life.number)
    if end <= prompt and gaps == [(start, end)]:  # a part of the prompt, for the first time
        account.first_prompt += end - start
        account.executed_first.append((start, end, life.number))
        return
    new = 0
    for low, high in gaps:
        new += high - low
        in_prompt = max(0, min(high, prompt) - low)
        account.first_prompt += in_prompt
        account.first_output += high - low - in_prompt
        if in_prompt:
            account.executed_first.append((low, low + in_prompt, life.number))
    if new < end - start:
        again = _without(start, end, gaps)
        for low, high, cause in account.losses.split(again):
            add_tokens(account.rework, cause, high - low)
            if cause == causes.UNKNOWN:
                account.suspense += high - low
            if low < prompt:
                account.executed_again.append((low, min(high, prompt), cause))


def execute_invalid(account: Account, flight: InFlight, end: int) -> None:
    """Post tokens of an ended life, or above a failed load, up to position ``end``.

    Their KV is lost at once.
    """
    life, start = flight.life, flight.start + flight.posted
    execute(account, life, start, end)
    if flight.invalid_from >= 0:
        account.positions.revoke(max(start, flight.invalid_from), life.number)
        account.losses.add(max(start, flight.invalid_from), end, causes.LOAD_FAILED)
    else:
        account.losses.add(start, end, life.ended_by)


def execute_before_hit(account: Account, hit_end: int) -> None:
    """Post the tokens below position ``hit_end`` that steps of ended lives have in flight.

    Drafts are left out: the sequence does not contain them yet, so no hit covers them.
    """
    for flight in account.in_flight:
        end = min(flight.start + flight.tokens - flight.drafts, hit_end)
        if flight.life.ended_by and not flight.overrun and end > flight.start + flight.posted:
            execute_invalid(account, flight, end)
            flight.posted = end - flight.start


def _without(start: int, end: int, gaps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of [start, end) that are in none of ``gaps`` (sorted, disjoint)."""
    pieces = []
    for low, high in gaps:
        if start < low:
            pieces.append((start, low))
        start = high
    if start < end:
        pieces.append((start, end))
    return pieces


# --- counting rules ------------------------------------------------------------------------------------
#
# Where the account shows that the engine counts something by another rule than the figure's definition.
#
# These functions make entries only; the definitions are in ``checks/figures.py`` and the checks in
# ``checks/prompt_drifts.py`` and ``checks/lookup_drifts.py``.


_SAMPLE = re.compile(r"(\d+)_(.+-[0-9a-f]{8})")
"""vLLM's id of one sample of a client's request: its number, and the shared id with its random end."""

_REPORTING = ("first", "last", "mixed")
"""Values of the engine's setting ``figures`` with which it reports a prompt's sources at all."""

NO_DRAFTS = (0, 0, 0)
"""Draft tokens of an output without any: proposed, padding, accepted."""


def expect_queries(state: LedgerState, account: Account, life: Life, event: ev.Admitted, asked: int) -> None:
    """Note what the exported statistics should count for this admission, of which ``asked`` by the connector.

    Lookups after a preemption are counted apart, and no counter exports them.
    """
    local = account.sequence_tokens if event.counted else 0
    exempt = state.prefix_caching and not event.counted
    if not event.resumed:
        life.queried_local = local
        life.queried_external = 0 if exempt else asked
        return
    if local and state.counts_local:
        miscounted(state, account, "resumed", "local", 1, local, event.local_tokens)
    if asked and not exempt and state.counts_external:
        miscounted(state, account, "resumed", "external", 1, asked, event.external_tokens)


def never_ran(state: LedgerState, account: Account, life: Life) -> None:
    """A life ended before it ran: its lookups were counted, and nothing read what they hit."""
    if life.queried_local and state.counts_local:
        miscounted(state, account, "never_ran", "local", 1, life.queried_local, life.local)
    if life.queried_external and state.counts_external:
        miscounted(state, account, "never_ran", "external", 1, life.queried_external, max(0, life.external))


def load_failed(state: LedgerState, account: Account, life: Life, tokens: int) -> None:
    """External tokens failed to load: they were counted as hits of the connector."""
    if life.queried_external and state.counts_external:
        miscounted(state, account, "load_failed", "external", 0, 0, tokens)


def counted_otherwise(
    state: LedgerState, source: str, counted: tuple[int, ...], expected: list[int], beside: tuple[int, ...]
) -> list[int]:
    """What the ledger compares the engine's statistics of this step with.

    ``beside``: lookups that are not to be counted. If the engine counted all of them, that is entered, and
    they are part of the comparison.
    """
    why = "attempts" if source == "local" else "exempt"
    if not beside[0]:
        return expected
    together = [own + more for own, more in zip(expected, beside, strict=True)]
    if counted != tuple(together):
        return expected
    miscounted(state, None, why, source, *beside)
    return together


def unreported(state: LedgerState, account: Account) -> None:
    """Enter the tokens of a prompt, or of a session's chunk, that ended without a report of the engine."""
    if account.reports or state.reported_admission not in _REPORTING or not account.settlements:
        return
    last = account.settlements[-1]
    session = len(account.settlements) > 1
    if session and state.reported_admission == "mixed":
        return  # up to 0.19 each chunk is reported, and only the first report is recorded
    if not session and (account.plan is None or last.at != account.closed_at or account.sampled):
        return
    tokens = last.local + last.external + last.computed
    if tokens:
        _enter(state, PromptUnreported(tokens, session), account)


def count_drafts(state: LedgerState, flight: InFlight, accepted: int) -> None:
    """Add the draft tokens of one request in an output. In the first step of a life they are padding."""
    proposed, padding, taken = state.output_drafts
    if flight.life.delivered:
        proposed += flight.drafts
    else:
        padding += flight.drafts
    state.output_drafts = (proposed, padding, taken + accepted)


def cut_off(state: LedgerState, account: Account, sequence_tokens: int) -> None:
    """A request with drafts has ended: the engine drops what an output sampled past the stop."""
    cut = account.sequence_tokens - sequence_tokens
    if account.drafted and sequence_tokens >= 0 and cut > 0:
        state.cut_drafts += cut - 1  # The token sampled beside the drafts is the first to go, and no draft.
        account.sequence_tokens = sequence_tokens


def drafts_counted(state: LedgerState, event: ev.DraftsCounted) -> None:
    """Post the engine's statistics of speculative decoding; those of a diffusion model are other figures."""
    if state.sampled_beside_drafts and state.lost_track is None:
        counted = event.draft_tokens, event.accepted_tokens
        _enter(state, CountedDrafts(state.step, *counted, *state.output_drafts, state.cut_drafts), None)


def sibling(state: LedgerState, account: Account) -> None:
    """Enter that this request and one that lives are samples of one client's request."""
    named = _SAMPLE.fullmatch(account.request_id) if "_" in account.request_id else None
    if named is None or named[1] == "0":
        return
    earlier = f"{int(named[1]) - 1}_{named[2]}"
    for other in state.living.values():
        if other.request_id == earlier and other.prompt_tokens == account.prompt_tokens:
            _enter(state, SiblingAdded(named[2], int(named[1])), account)
            return


def miscounted(
    state: LedgerState, account: Account | None, why: str, source: str, requests: int, queries: int, hits: int
) -> None:
    """Enter lookups that the engine counts by a rule of its own."""
    _enter(state, MiscountedLookups(why, source, requests, queries, hits), account)


def _enter(
    state: LedgerState,
    subject: MiscountedLookups | PromptUnreported | CountedDrafts | SiblingAdded,
    account: Account | None,
) -> None:
    state.entries.append(Entry(state.number, state.step, state.at, subject, account))
