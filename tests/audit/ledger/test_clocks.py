"""The times of requests, to the first admission, to the first output and to the last, sum up by cause."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from tests.audit.checks.false_reports import started
from tests.histories import GOLDEN, Golden, compressed, events, weave

from kvledger.audit.causes import FIRST_TOKEN, OUTPUT_TIME, QUEUE, QUEUED
from kvledger.audit.events import Event, Finished, Gap, RequestAdded
from kvledger.audit.ledger.account import Account
from kvledger.audit.ledger.clocks import DECODE_PLACE, PREFILL_PLACE
from kvledger.audit.ledger.ledger import Ledger

# --- the time before the first admission: its causes, and that they sum to it -----------------------------
#
# The events of a history are 10 microseconds apart. A word ``W:budget`` says that a step left requests
# waiting because its token budget was spent.


RAN = "A0+0 s32 o+ F"


def accounts(stream: Iterable[Event], *, recorded: bool = True) -> dict[int, Account]:
    ledger = Ledger(keep_closed=True)
    ledger.apply(started(queue_causes=recorded))
    for event in stream:
        ledger.apply(event)
    return {account.request: account for account in ledger.accounts()}


def queued(account: Account) -> dict[str, int] | None:
    """Microseconds by cause without its prefix; causes without any are left out."""
    found = account.queued
    if found is None:
        return None
    assert account.first_token is not None
    assert sum(found) == account.first_token[list(FIRST_TOKEN).index(QUEUED)]
    assert min(found) >= 0
    return {cause.removeprefix("queued_"): spent for cause, spent in zip(QUEUE, found, strict=True) if spent}


def of(words: str) -> dict[str, int] | None:
    (account,) = accounts(events(32, words)).values()
    return queued(account)


CAUSES = ("budget", "running_limit", "blocks", "preemption", "paused", "unknown")
QUEUES: list[tuple[str, dict[str, int] | None]] = [
    (RAN, {"next_step": 20}),
    *((f"W:{cause} {RAN}", {"next_step": 10, cause: 20}) for cause in CAUSES),
    (f"W:budget W:budget W:blocks {RAN}", {"next_step": 10, "budget": 20, "blocks": 20}),
    (f"W:moon {RAN}", {"next_step": 10, "unknown": 20}),  # a cause of a newer release
    ("A0+0 s16 o P W:blocks A0+0 s32 o+ F", {"next_step": 20}),  # not the queue after a preemption
    ("W:budget A0+0 s16 o F:aborted", None),
    ("W:budget F:aborted", None),
]


@pytest.mark.parametrize(("words", "expected"), QUEUES)
def test_a_request_waits_for_each_cause_from_the_step_that_left_it_waiting(
    words: str, expected: dict[str, int] | None
):
    assert expected == of(words)


def test_a_request_that_comes_later_waits_for_a_step_before_the_cause_that_holds():
    """The first request is left waiting; the second one comes after that and is admitted with the first."""
    stream = weave({0: 32, 1: 32}, "W:budget A0+0 b.A0+0 s32&b.s32 o+&b.o+ F b.F")
    second = stream.pop(1)
    assert isinstance(second, RequestAdded)
    late = RequestAdded(stream[1].at + 5, *_fields(second)[1:])
    found = accounts([*stream[:2], late, *stream[2:]])
    assert {"next_step": 20, "budget": 20} == queued(found[0])
    assert {"next_step": 35} == queued(found[1])


def test_a_request_that_comes_during_a_pause_waits_for_its_end():
    stream = events(32, "W:next_step " + RAN)
    paused = events(32, "W:paused")[1]
    found = accounts([type(paused)(5, paused.cause), *stream])
    assert {"paused": 10, "next_step": 20} == queued(found[0])


@pytest.mark.parametrize("words", ["W:budget W:budget W:blocks ", "W:paused W:next_step ", ""])
def test_a_clock_that_is_read_anew_changes_no_cause(words: str):
    ledger = Ledger(keep_closed=True)
    ledger.apply(started(queue_causes=True))
    for event in events(32, words + RAN):
        ledger.apply(event)
        ledger.queue.read_anew()
    (account,) = ledger.accounts()
    assert of(words + RAN) == queued(account)


def test_without_a_record_of_the_causes_all_is_unknown():
    (account,) = accounts(events(32, RAN), recorded=False).values()
    assert {"unknown": 20} == queued(account)


def test_a_request_that_comes_after_lost_events_has_none_of_the_causes_before():
    stream = events(32, RAN)
    before = events(32, "W:budget")[1]
    found = accounts([type(before)(2, before.cause), Gap(4, 3, "test"), *stream])
    assert found[0].unknown is not None


def _fields(event: Event) -> tuple[object, ...]:
    return tuple(getattr(event, name) for name in event.__struct_fields__)


# --- the time to a first output: its causes, and that they sum to it --------------------------------------
#
# The events of a history are 10 microseconds apart.


def first_token(prompt_tokens: int, words: str, *, pooling: bool = False) -> dict[str, int] | None:
    """Microseconds by cause; causes without any are left out."""
    ledger = Ledger(keep_closed=True)
    for event in events(prompt_tokens, words, pooling=pooling):
        ledger.apply(event)
    found = _only(ledger).first_token
    return found and {cause: spent for cause, spent in zip(FIRST_TOKEN, found, strict=True) if spent}


def _only(ledger: Ledger) -> Account:
    (account,) = ledger.accounts()
    return account


FAILED = {"queued": 30, "remote_load": 20, "ready": 10, "load_failed": 20, "prefill": 20}
TIMES: dict[str, tuple[str, dict[str, int] | None]] = {
    "queued until its admission": ("A0+0 s32 o+ F", {"queued": 20, "prefill": 20}),
    "preempted between lives": (
        "A0+0 s16 o P A0+0 s32 o+ F",
        {"queued": 20, "prefill": 30, "preempted": 20, "prefill_again": 20},
    ),
    "preempted after the first output": ("A0+0 s32 o+ P A0+0 s33 o+ F", {"queued": 20, "prefill": 20}),
    "the output comes after the preemption": (
        "A0+0 s32 P o+ A0+0 s33 o+ F",
        {"queued": 20, "prefill": 20, "preempted": 10},
    ),
    "an asynchronous load, and then a step": (
        "A0+16 L s16 o+ F",
        {"queued": 30, "remote_load": 10, "ready": 10, "prefill": 10},
    ),
    "a synchronous load": ("A0+16 C16 s16 L o+ F", {"queued": 30, "prefill": 30}),
    "it has not prefilled before a load that fails": ("A0+16a L0 A0+0 s32 o+ F", FAILED),
    "no output": ("A0+0 s16 o F:aborted", None),
    "the first turn of a session": ("A0+0 s32 o+ S X16 s17 o+ F", {"queued": 20, "prefill": 20}),
}


@pytest.mark.parametrize("name", TIMES)
def test_the_time_to_the_first_output_has_these_causes(name: str):
    words, expected = TIMES[name]
    assert expected == first_token(32, words)


def test_a_request_for_a_pooling_model_has_no_time():
    assert first_token(32, "A0+0 s32 o F", pooling=True) is None


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.title)
def test_the_causes_sum_to_the_time(golden: Golden):
    """The first output is read off the events by itself: the first delivered token of the request."""
    ledger = Ledger(keep_closed=True)
    first = None
    for event in golden.events():
        ledger.apply(event)
        if first is None and any(a.sequence_tokens > a.prompt_tokens for a in ledger.accounts()):
            first = event.at
    account = _only(ledger)
    if account.first_token is None:
        assert first is None or account.unknown is not None or account.pooling
    else:
        assert sum(account.first_token) == (first or 0) - account.added_at
        assert min(account.first_token) >= 0


# --- the time from the first output to the last: its causes, and that they sum to it ----------------------
#
# The events of a history are 10 microseconds apart.


def account(prompt_tokens: int, words: str) -> Account:
    ledger = Ledger(keep_closed=True)
    for event in events(prompt_tokens, words):
        ledger.apply(event)
    (found,) = ledger.accounts()
    return found


def spent(prompt_tokens: int, words: str) -> dict[str, int] | None:
    """Microseconds by cause; causes without any are left out."""
    found = account(prompt_tokens, words).output_time
    return found and {cause: us for cause, us in zip(OUTPUT_TIME, found, strict=True) if us}


AGAIN = {"decode_preempted": 20, "decode_loading": 10, "decode_again": 10}
LATER: list[tuple[str, dict[str, int] | None]] = [
    ("A0+0 s32 o+ s1 o+ s1 o+ F", {"decode": 50}),
    ("A0+0 s32 o+ s1 o+ P A0+0 s34 o+ F", {"decode": 40, **AGAIN}),
    ("A0+0 s16 o P A0+0 s32 o+ s1 o+ F", {"decode": 30}),  # preempted before the first output
    ("A0+0 s32 P o+ A0+0 s33 o+ F", {"decode": 10, **AGAIN}),  # and between its step and it
    ("A0+0 s32 o+ s1 o+ F:aborted", None),
    ("A0+0 s32 o+ S X16 s17 o+ F", None),
]


@pytest.mark.parametrize(("words", "expected"), LATER)
def test_the_time_from_the_first_output_to_the_last_has_these_causes(
    words: str, expected: dict[str, int] | None
):
    assert expected == spent(32, words)


def test_tokens_after_the_first_are_counted():
    assert 2 == account(32, "A0+0 s32 o+ s1 o+ s1 o+ F").later_tokens


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.title)
def test_the_causes_sum_to_the_output_time(golden: Golden):
    ledger = Ledger(keep_closed=True)
    end = None
    for event in golden.events():
        ledger.apply(event)
        if isinstance(event, Finished):
            end = event.at
    (found,) = ledger.accounts()
    if found.output_time is not None:
        assert found.first_token is not None
        assert sum(found.output_time) == (end or 0) - found.added_at - sum(found.first_token)
        assert min(found.output_time) >= 0


# --- how the requests of a step share its time, and that the shares sum to it -----------------------------
#
# The events of a history are 10 microseconds apart; arrival, lookup and admission are an event each.


def accounts_of_steps(stream: Iterable[Event]) -> dict[int, Account]:
    ledger = Ledger(keep_closed=True)
    for event in stream:
        ledger.apply(event)
    return {account.request: account for account in ledger.accounts()}


def prefill(words: str, **prompts: int) -> dict[int, tuple[int, int] | None]:
    found = accounts_of_steps(weave(dict(enumerate(prompts.values())), words))
    return {request: account.prefill_parts for request, account in found.items()}


def decode(words: str, **prompts: int) -> dict[int, tuple[int, int] | None]:
    found = accounts_of_steps(weave(dict(enumerate(prompts.values())), words))
    return {request: account.decode_parts for request, account in found.items()}


def test_a_request_alone_has_all_of_its_time():
    assert {0: (20, 0)} == prefill("A0+0 s32 o+ F", a=32)
    assert {0: (50, 0)} == decode("A0+0 s32 o+ s1 o+ s1 o+ F", a=32)


def test_a_step_is_shared_by_tokens():
    """The admissions are 30 and 10 microseconds before the step, which lasts 10."""
    found = prefill("A0+0 b.A0+0 s32&b.s128 o+&b.o+ F b.F", a=32, b=128)
    assert {0: (30 + 2, 8), 1: (10 + 8, 2)} == found


def test_a_step_without_the_request_is_of_others():
    found = prefill("b.A0+0 b.s32 b.o+ A0+0 s16 o b.s1 b.o+ s16 o+ F b.F", a=32, b=32)
    assert (10 + 20 + 10, 20) == found[0]


def test_decode_beside_a_prefill_has_the_share_of_one_token():
    """The request decodes for 50 microseconds alone, then for 20 beside 99 tokens, then it ends."""
    found = decode("A0+0 s32 o+ s1 o+ b.A0+0 s1&b.s99 o+&b.o+ F b.F", a=32, b=99)
    assert (50, 20) == found[0]


def test_a_request_that_left_the_steps_shares_no_more():
    """The other request is preempted; its tokens are in no later step."""
    found = prefill("b.A0+0 b.s32 b.o+ A0+0 b.P s32 o+ F b.F:aborted", a=32, b=32)
    assert found[0] == (10 + 10 + 10, 0)


def test_a_decode_has_its_share_of_each_step_until_its_end():
    """The step of the prefills lasts another 10 microseconds, then both have a half."""
    found = decode("A0+0 b.A0+0 s32&b.s128 o+&b.o+ (s1&b.s1 o+&b.o+)x2 F b.F", a=32, b=128)
    assert {0: (2 + 20, 8 + 20), 1: (8 + 25, 2 + 25)} == found


@pytest.mark.parametrize("reading", [1, 3**20, (1 << 63) - 2])
def test_what_the_clock_reads_at_first_changes_no_share(reading: int):
    stream = weave({0: 32, 1: 128}, "A0+0 b.A0+0 s32&b.s128 o+&b.o+ (s1&b.s1 o+&b.o+)x3 F b.F")
    ledger = Ledger(keep_closed=True)
    ledger.step_clock.reading = reading
    for event in stream:
        ledger.apply(event)
    plain = accounts_of_steps(stream)
    for account in ledger.accounts():
        assert account.decode_parts == plain[account.request].decode_parts
        assert account.prefill_parts == plain[account.request].prefill_parts


def test_a_clock_that_is_read_anew_changes_no_share():
    stream = weave({0: 32, 1: 128}, "A0+0 b.A0+0 s32&b.s128 o+&b.o+ (s1&b.s1 o+&b.o+)x3 F b.F")
    plain = accounts_of_steps(stream)
    ledger = Ledger(keep_closed=True)
    for event in stream:
        ledger.apply(event)
        lives = [account.life for account in ledger.living.values() if account.life is not None]
        ledger.step_clock.read_anew(life for life in lives if life.step_tokens)
    for account in ledger.accounts():
        assert account.decode_parts == plain[account.request].decode_parts
        assert account.prefill_parts == plain[account.request].prefill_parts


def test_unchanged_steps_give_the_same_shares():
    words = "A0+0 b.A0+0 s32&b.s128 o+&b.o+ (s1&b.s1 o+&b.o+)x20 F b.F"
    stream = weave({0: 32, 1: 128}, words)
    plain, fewer = accounts_of_steps(stream), accounts_of_steps(compressed(stream))
    for request in (0, 1):
        assert plain[request].decode_parts == fewer[request].decode_parts
        assert plain[request].prefill_parts == fewer[request].prefill_parts


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.title)
def test_the_parts_sum_to_their_cause(golden: Golden):
    (found,) = accounts_of_steps(golden.events()).values()
    if found.first_token is not None:
        assert found.prefill_parts is not None
        assert sum(found.prefill_parts) == found.first_token[PREFILL_PLACE]
        assert min(found.prefill_parts) >= 0
    if found.output_time is not None:
        assert found.decode_parts is not None
        assert sum(found.decode_parts) == found.output_time[DECODE_PLACE]
        assert min(found.decode_parts) >= 0
