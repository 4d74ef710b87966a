"""Chats with planted causes on a real scheduler: each turn's misses have the planted cause, to the token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain as joined
from itertools import pairwise
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace
from tests.scenarios.driving import lora
from tests.turns.chats import BLOCK, Engine, Expected, Sent, chat, expected, hits, of, shared, words

from kvledger.audit.analysis.turns import LiveTurnState, Turn
from kvledger.audit.engines.weights_watch import mark_weights
from kvledger.audit.journal.reader import Reader
from kvledger.audit.replay.followed_audit import FollowedAudit
from kvledger.audit.replay.observers import LiveTurns
from kvledger.audit.replay.serialize import capture, restore
from kvledger.exporters.facts.compact import compact
from kvledger.exporters.reports.page import gather
from kvledger.exporters.reports.query import ask
from kvledger.exporters.reports.turns import sentence, turns

SEEDS = range(6)


def found(folder: Path) -> dict[str, Turn]:
    """The turns of all journals, by request id."""
    return {turn.request_id: turn for turn in turns([folder]).each}


def agree(folder: Path, sent: Sequence[Sent], cause: str = "", *, cached: bool = True) -> None:
    """The turns of one chat are as expected: each misses what the planted cause took.

    ``cached``: the engine hits all that a turn shares with any turn before it.
    """
    by_id = found(folder)
    assert 1 == by_id[sent[0].request_id].number and not by_id[sent[0].request_id].lost
    for place, (before, turn) in enumerate(pairwise(sent), 2):
        known = by_id[turn.request_id]
        hit = max(hits(one, turn) for one in sent[: place - 1]) if cached else 0
        assert expected(before, turn, cause, hit) == Expected(known.reusable, known.lost)
        assert hit == known.hit
        assert (place, before.request_id) == (known.number, known.before)


def prompt_prefix(dice: Random, length: int) -> Callable[[int, list[int]], list[int]]:
    """A change of the first tokens at every turn, as a time in the system prompt makes."""
    return lambda number, prompt: words(Random(f"{dice.random()} {number}"), length) + prompt[length:]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_chat_that_only_grows_misses_what_no_full_block_holds(tmp_path: Path, seed: int) -> None:
    engine, dice = Engine("one"), Random(seed)
    sent = chat(engine, "chat", dice, 6)
    engine.stop(tmp_path)

    agree(tmp_path, sent)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_time_in_the_system_prompt_is_a_divergence(tmp_path: Path, seed: int) -> None:
    engine, dice = Engine("one"), Random(seed)
    sent = chat(engine, "chat", dice, 5, prompt_prefix(dice, 8))
    engine.stop(tmp_path)

    agree(tmp_path, sent, "diverged")
    assert all(0 == turn.parted_at for turn in found(tmp_path).values() if turn.before)


@pytest.mark.parametrize("seed", SEEDS)
def test_tools_in_another_order_part_where_the_first_tool_differs(tmp_path: Path, seed: int) -> None:
    engine, dice = Engine("one"), Random(seed)
    system, tools = words(dice, 70), [words(dice, 40) for _ in range(5)]
    question = words(dice, 30)
    sent = []
    for number in range(1, 6):
        dice.shuffle(tools)
        sent.append(
            engine.send(f"chat-{number}", [*system, *joined.from_iterable(tools), *question], **of("chat"))
        )
        question = question + sent[-1].sequence[len(sent[-1].prompt) :] + words(dice, 20)
        engine.now += 3
    engine.stop(tmp_path)

    agree(tmp_path, sent, "diverged")
    by_id = found(tmp_path)
    for before, turn in pairwise(sent):
        same = shared(before.prompt, turn.prompt) // BLOCK * BLOCK
        assert by_id[turn.request_id].shared == same


@pytest.mark.parametrize("seed", SEEDS)
def test_an_answer_that_comes_back_shorter_is_told_from_a_changed_prompt(tmp_path: Path, seed: int) -> None:
    engine, dice = Engine("one"), Random(seed)
    prompt, sent = words(dice, 4 * BLOCK), list[Sent]()
    for number in range(1, 6):
        sent.append(engine.send(f"chat-{number}", prompt, 60, **of("chat")))
        answer = sent[-1].sequence[len(prompt) :]
        prompt = [*prompt, *answer[40:], *words(dice, 8)]  # the first 40 tokens were reasoning
        prompt = prompt[: len(prompt) // BLOCK * BLOCK]
        engine.now += 3
    engine.stop(tmp_path)

    agree(tmp_path, sent, "answer")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rewritten_history_parts_where_it_was_rewritten(tmp_path: Path, seed: int) -> None:
    engine, dice = Engine("one"), Random(seed)

    def compact(number: int, prompt: list[int]) -> list[int]:
        return prompt if number != 4 else [*prompt[:64], *words(dice, 30), *prompt[-20:]]

    sent = chat(engine, "chat", dice, 6, compact)
    engine.stop(tmp_path)

    agree(tmp_path, sent, "diverged")


def test_another_adapter_or_salt_is_no_divergence(tmp_path: Path) -> None:
    for cause in ("adapter", "salt"):
        engine, dice = Engine(cause), Random(3)
        prompt, sent = words(dice, 100), list[Sent]()
        for number in range(1, 5):
            other: dict[str, Any] = {"cache_salt": f"salt {number > 2}"}
            if cause == "adapter":
                other = lora("french" if number > 2 else "german", 1 + (number > 2))
            sent.append(engine.send(f"{cause}-{number}", prompt, **of(cause, **other)))
            prompt = sent[-1].sequence + words(dice, 30)
            engine.now += 2
        engine.stop(tmp_path)

        by_id = found(tmp_path)
        third = by_id[f"{cause}-3"]
        assert {cause: third.reusable} == third.lost
        assert all(not {"adapter", "salt", "diverged"} & by_id[f"{cause}-{n}"].lost.keys() for n in (2, 4))


@pytest.mark.parametrize("seed", SEEDS)
def test_think_time_beyond_retention_is_an_eviction_with_time_and_request(tmp_path: Path, seed: int) -> None:
    engine, dice = Engine("one", blocks=40), Random(seed)
    first = engine.send("chat-1", words(dice, 150), 20, **of("chat"))
    filler = engine.send("filler", words(dice, 620), 2, **of("other"))
    engine.now += 60
    second = engine.send("chat-2", first.sequence + words(dice, 30), 20, **of("chat"))
    engine.stop(tmp_path)

    turn = found(tmp_path)["chat-2"]
    whole = (len(first.sequence) - 1) // BLOCK * BLOCK
    assert 0 < turn.lost["evicted"] == whole - turn.hit
    assert len(first.sequence) - 1 - whole == turn.lost.get("below_block", 0)
    assert turn.evicted is not None and "filler" == turn.evicted.by
    assert filler.arrived <= turn.evicted.seconds - 1_767_225_600.0 <= filler.ended
    assert abs(second.arrived - first.ended - (turn.idle_seconds or 0)) < 0.05


def test_a_reset_between_two_turns_is_named(tmp_path: Path) -> None:
    engine, dice = Engine("one"), Random(5)
    first = engine.send("chat-1", words(dice, 100), **of("chat"))
    engine.reset()
    second = engine.send("chat-2", first.sequence + words(dice, 30), **of("chat"))
    engine.stop(tmp_path)

    agree(tmp_path, [first, second], "cache_reset", cached=False)


def test_a_reset_for_new_weights_is_told_from_another(tmp_path: Path) -> None:
    engine, dice = Engine("one"), Random(5)
    first = engine.send("chat-1", words(dice, 100), **of("chat"))
    mark_weights("step 2")
    engine.reset()
    second = engine.send("chat-2", first.sequence + words(dice, 30), **of("chat"))
    engine.reset()
    third = engine.send("chat-3", second.sequence + words(dice, 30), **of("chat"))
    engine.stop(tmp_path)

    by_id = found(tmp_path)
    assert "new_weights" in by_id["chat-2"].lost and "cache_reset" not in by_id["chat-2"].lost
    assert "cache_reset" in by_id[third.request_id].lost


def test_a_turn_that_ran_on_another_engine_is_named_and_numbered(tmp_path: Path) -> None:
    one, other, dice = Engine("one"), Engine("other"), Random(6)
    first = one.send("chat-1", words(dice, 100), **of("chat"))
    other.now = one.now + 5
    second = other.send("chat-2", first.sequence + words(dice, 30), **of("chat"))
    other.now += 5
    third = other.send("chat-3", second.sequence + words(dice, 30), **of("chat"))
    one.stop(tmp_path)
    other.stop(tmp_path)

    by_id = found(tmp_path)
    assert {"other_engine": len(first.sequence) - 1} == by_id["chat-2"].lost
    assert [1, 2, 3] == [by_id[sent.request_id].number for sent in (first, second, third)]
    assert {"below_block"} >= by_id["chat-3"].lost.keys()


def test_a_request_that_may_not_read_the_cache_is_cached_and_not_hit(tmp_path: Path) -> None:
    engine, dice = Engine("one"), Random(7)
    first = engine.send("chat-1", words(dice, 100), **of("chat"))
    second = engine.send("chat-2", first.sequence + words(dice, 30), prompt_logprobs=True, **of("chat"))
    engine.stop(tmp_path)

    agree(tmp_path, [first, second], "not_hit", cached=False)


def test_a_request_sent_again_is_no_new_turn_and_forks_have_one_parent(tmp_path: Path) -> None:
    engine, dice = Engine("one"), Random(8)
    first = engine.send("chat-1", words(dice, 100), **of("chat"))
    again = engine.send("chat-9", first.prompt, **of("chat"))
    left, right = engine.send_all(
        [(name, first.sequence + words(dice, 40)) for name in ("chat-20", "chat-21")], **of("chat")
    )
    engine.stop(tmp_path)

    by_id = found(tmp_path)
    assert by_id[again.request_id].retried and 1 == by_id[again.request_id].number
    for fork in (left, right):
        assert (2, False) == (by_id[fork.request_id].number, by_id[fork.request_id].retried)
        assert first.request_id == by_id[fork.request_id].before


def test_sessions_are_inferred_from_blocks(tmp_path: Path) -> None:
    engine, dice = Engine("one"), Random(9)
    system = words(dice, 3 * BLOCK)
    chats = {name: system + words(dice, 40) for name in "abcdef"}
    for number in range(1, 5):
        for name in chats:
            sent = engine.send(f"{name}.{number}", chats[name])
            chats[name] = sent.sequence + words(dice, 25)
    engine.stop(tmp_path)

    by_id = found(tmp_path)
    sessions = {name: {by_id[f"{name}.{n}"].session for n in range(1, 5)} for name in chats}
    assert all(1 == len(one) for one in sessions.values()), sessions
    assert len(chats) == len(set.union(*sessions.values()))
    assert all(not by_id[f"{name}.{n}"].given for name in chats for n in range(1, 5))
    assert [1, 2, 3, 4] == [by_id[f"a.{n}"].number for n in range(1, 5)]


def test_a_first_request_of_the_common_beginning_alone_starts_no_session_of_all(tmp_path: Path) -> None:
    engine, dice = Engine("one"), Random(10)
    system = words(dice, 3 * BLOCK)
    engine.send("warm-up", system + words(dice, 4), 2)
    engine.send("one", system + words(dice, 40))
    engine.send("two", system + words(dice, 40))
    engine.stop(tmp_path)

    by_id = found(tmp_path)
    assert by_id["two"].session != by_id["one"].session


def test_the_command_the_rows_and_the_metrics_count_the_same_turns(tmp_path: Path) -> None:
    engine, dice = Engine("one", blocks=60), Random(11)
    for number in range(4):
        chat(engine, f"chat-{number}", dice, 5, prompt_prefix(dice, 8 * (number % 2)))
    first = engine.send("last-1", words(dice, 150), **of("last"))
    engine.send("filler", words(dice, 900), 2, **of("other"))
    engine.send("last-2", first.sequence + words(dice, 30), **of("last"))
    engine.stop(tmp_path)

    told = turns([tmp_path])
    asked = ask(
        [tmp_path],
        "select count(*), sum(prompt_tokens), sum(hit), sum(reusable), sum(lost_diverged), "
        "sum(lost_evicted), sum(lost_below_block) from turns where before is not null",
    )
    lost = {row.cause: row.tokens for row in told.causes}
    sums = (told.turns, told.prompt_tokens, told.hit, told.reusable)
    assert (*sums, *(lost.get(cause, 0) for cause in ("diverged", "evicted", "below_block"))) == tuple(
        asked.rows[0]
    )
    assert lost["diverged"] and lost["evicted"]

    followed = FollowedAudit(tmp_path / "one")
    with Reader(tmp_path / "one") as journal:
        for _ in followed.batches(journal):
            pass
    followed = restore(capture(followed), FollowedAudit(tmp_path / "one"))
    counts = followed.turns
    assert sums == (counts.turns, counts.prompt_tokens, counts.hit, counts.reusable)
    assert lost == counts.lost

    followed.end(stopped=True)  # a sidecar keeps the sums of an engine that has ended, and no block
    assert sums[0] == followed.turns.turns
    assert LiveTurnState(followed.turns) == followed.of(LiveTurns).saved


def test_a_longer_retention_saves_the_turns_that_came_within_it(tmp_path: Path) -> None:
    engine, dice = Engine("one", blocks=60), Random(12)
    for number, pause in enumerate((5, 100)):
        first = engine.send(f"chat-{number}-1", words(dice, 150), **of(f"chat-{number}"))
        engine.send(f"filler-{number}", words(dice, 900), 2, **of("other"))
        engine.now += pause
        engine.send(f"chat-{number}-2", first.sequence + words(dice, 30), **of(f"chat-{number}"))
    engine.stop(tmp_path)

    told = turns([tmp_path])
    by_id = found(tmp_path)
    lost = [by_id[f"chat-{number}-2"].lost["evicted"] for number in range(2)]
    assert [lost[0], lost[0], sum(lost)] == [row.tokens for row in told.retention[:3]]
    assert all(row.held_tokens <= sum(turn.kept for turn in told.each) for row in told.retention[:1])
    pinned = told.retention[-1]
    assert (None, sum(lost)) == (pinned.seconds, pinned.tokens)

    after = {turn.before: turn.arrived_seconds for turn in told.each if turn.before}

    def held(at: float, seconds: float) -> int:
        return sum(
            turn.kept
            for turn in told.each
            if turn.ended_seconds <= at < min(after.get(turn.request_id, inf), turn.ended_seconds + seconds)
        )

    last = max(turn.ended_seconds for turn in told.each)
    for row in told.retention:
        ends = [
            turn.ended_seconds for turn in told.each if row.seconds is not None or turn.ended_seconds < last
        ]
        assert max(held(at, row.seconds or inf) for at in ends) == row.most_held_tokens


def timed(folder: Path, token_seconds: float) -> list[list[Sent]]:
    """Chats of which every second one has a time in its system prompt, on an engine of planned step times."""
    engine, dice = Engine("one", token_seconds=token_seconds), Random(13)
    chats = [
        chat(engine, f"chat-{number}", dice, 5, prompt_prefix(dice, 8 * (number % 2))) for number in range(8)
    ]
    engine.stop(folder)
    return chats


def test_lost_seconds_are_the_lost_tokens_at_the_price_of_a_prefill_token(tmp_path: Path) -> None:
    timed(tmp_path, token_seconds=0.001)

    told = turns([tmp_path])
    lost = sum(row.tokens for row in told.causes)
    assert pytest.approx(0.001 * lost, rel=0.01) == told.lost_seconds
    for row in told.worst:
        assert pytest.approx(0.001 * row.lost_tokens, rel=0.01) == row.lost_seconds
    assert f"took about {told.lost_seconds:.3g} s of engine time." in sentence(told)
    assert not any("seconds" in doubt for doubt in told.doubts)

    journal = tmp_path / "one"
    assert "" == compact(journal).problem
    assert told.lost_seconds == turns([tmp_path]).lost_seconds


def test_lost_seconds_are_unknown_where_step_times_do_not_follow_work(tmp_path: Path) -> None:
    timed(tmp_path, token_seconds=0.0)

    told = turns([tmp_path])
    assert sum(row.tokens for row in told.causes) and told.lost_seconds is None
    assert all(row.lost_seconds is None for row in told.worst)
    assert "engine time" not in sentence(told)
    assert ["the seconds of lost tokens are unknown"] == [doubt.partition(":")[0] for doubt in told.doubts]


def test_a_turn_that_ended_early_took_the_time_of_what_it_computed() -> None:
    turn = Turn(
        engine="", journal="", session="chat", given=True, request_id="chat-2", number=2, before="chat-1",
        retried=False, arrived_seconds=0.0, ended_seconds=1.0, idle_seconds=0.0, prompt_tokens=200, hit=20,
        reusable=100, shared=100, kept=50, lost={"unknown": 80}, prefill_seconds=0.5,
    )  # fmt: skip
    assert 0.5 * 30 == turn.lost_seconds
    assert 0.5 * 80 == replace(turn, kept=200).lost_seconds
    assert 0.0 == replace(turn, kept=20).lost_seconds


def test_the_page_has_the_turns_of_the_command(tmp_path: Path) -> None:
    one, other, dice = Engine("one", blocks=60, token_seconds=0.001), Engine("other"), Random(14)
    for number in range(4):
        chat(one, f"chat-{number}", dice, 5, prompt_prefix(dice, 8 * (number % 2)))
    first = one.send("last-1", words(dice, 150), **of("last"))
    one.send("filler", words(dice, 900), 2, **of("other"))
    one.send("last-2", first.sequence + words(dice, 30), **of("last"))
    other.now = one.now + 5
    chat(other, "chat-1", dice, 2)
    one.stop(tmp_path)
    other.stop(tmp_path)

    told = turns([tmp_path])
    assert {"other_engine", "diverged", "evicted"} < {row.cause for row in told.causes}
    only_here = {"worst": [], "doubts": [], "each": []}
    page = gather([tmp_path]).turns
    assert page is not None
    assert replace(told, **only_here) == replace(page, **only_here)
    assert [replace(turn, evicted=None) for turn in told.each] == page.each
