"""What the observer of SGLang's scheduler emits, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from msgspec.msgpack import Decoder
from tests import journals
from tests.command_line import exit_code
from tests.engines.sglang.small_scheduler import Batch, Request, Scheduler

from kvledger.audit import events as ev
from kvledger.audit.engines import choose, host_version
from kvledger.audit.engines.sglang.observer import SGLangObserver
from kvledger.audit.engines.sglang.slots import slots
from kvledger.audit.engines.v1_since_0_27 import V1Observer
from kvledger.audit.entry import plugin
from kvledger.audit.entry.attach import attach
from kvledger.audit.errors import LedgerError
from kvledger.audit.events import AnyEvent
from kvledger.exporters.metrics.metric_list import collect


class AbortReq(SimpleNamespace):
    """As SGLang's message."""


class UpdateWeightFromDiskReqInput(SimpleNamespace):
    """As SGLang's message."""


@pytest.fixture(autouse=True)
def release(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("sglang")
    module.__version__ = "0.5.23"
    monkeypatch.setitem(sys.modules, "sglang", module)


def events_of(audit: Any, kind: type[ev.Event]) -> list[Any]:
    audit._catch_up()
    found = [each for batch in audit._events for each in Decoder(list[AnyEvent]).decode(batch)]
    return [each for each in found if type(each) is kind]


def test_it_is_chosen_by_the_product_and_not_by_the_release() -> None:
    assert choose(Scheduler()) is SGLangObserver
    assert host_version(Scheduler()) == "0.5.23"
    assert SGLangObserver.ENGINE != V1Observer.ENGINE


def test_a_request_that_hits_computes_and_ends_is_settled() -> None:
    scheduler, request = Scheduler(), Request("a", prompt=8, outputs=2)
    audit = attach(scheduler)
    scheduler._add_request_to_queue(request)
    request.cached_tokens = 6
    request.host_hit_length, request.cached_tokens_host = 2, 2
    scheduler.step(Batch((request, 6, 2)))
    scheduler.step(Batch((request, 8, 1), extends=False))

    assert audit.verdict == "clean"
    totals = audit.totals
    assert (totals.of("local"), totals.of("external"), totals.of("computed")) == (4, 2, 2)
    assert totals.of("reported_local") == 4
    (tiers,) = events_of(audit, ev.TiersReported)
    assert (tiers.tiers, tiers.tokens) == (["host"], [2])


def test_a_request_that_is_refused_is_not_opened() -> None:
    scheduler = Scheduler()
    audit = attach(scheduler)
    scheduler.refuses = True
    scheduler._add_request_to_queue(Request("a"))

    assert not events_of(audit, ev.RequestAdded)


def test_a_prompt_that_is_refused_for_its_length_has_no_limit_of_outputs() -> None:
    """0.5.10 gives the first such turn of a session room for less than no output."""
    scheduler, request = Scheduler(), Request("a", outputs=-122)
    audit = attach(scheduler)
    scheduler._add_request_to_queue(request)

    (added,) = events_of(audit, ev.RequestAdded)
    assert added.max_tokens is None


def test_slots_that_a_running_turn_has_of_its_session_are_not_held_too() -> None:
    """Until 0.5.12 the cache's own count has them, and the request has them as well."""
    scheduler, request = Scheduler(), Request("a", outputs=9)
    borrowed, waits = (
        SimpleNamespace(req_pool_idx=row, kv_allocated_len=8, cache_protected_len=2) for row in (1, 2)
    )
    cache = scheduler.tree_cache
    cache.slots, cache.session_held_tokens = {"s": borrowed, "t": waits}, lambda: 12
    parts = slots(scheduler, [request], ())

    assert parts is not None and parts.held_slots == 6


def test_requests_that_an_abort_takes_from_the_queue_have_ended() -> None:
    scheduler, stays = Scheduler(), Request("b")
    audit = attach(scheduler)
    scheduler._add_request_to_queue(Request("a"))
    scheduler._add_request_to_queue(stays)
    scheduler.process_input_requests([AbortReq(rid="a")])
    scheduler.get_next_batch_to_run()

    (finished,) = events_of(audit, ev.Finished)
    assert finished.reason == "aborted"
    assert set(audit.ledger.living) == {1}


@pytest.mark.parametrize(
    ("reasons", "outcome"),
    [
        ({"to_finish": "for lack of room"}, "aborted"),
        ({"to_finish": None, "finished_reason": "its chunk could not be loaded"}, "aborted"),
        ({"to_finish": None}, "unknown"),
    ],
)
def test_a_request_that_ran_and_is_gone_was_aborted_by_the_engine_or_lost(
    reasons: dict[str, Any], outcome: str
) -> None:
    """It was retracted last, and is not put back into the queue; no message asked for its end."""
    scheduler, request, stays = Scheduler(), Request("a", outputs=9), Request("b", outputs=9)
    audit = attach(scheduler)
    for each in (request, stays):
        scheduler._add_request_to_queue(each)
    scheduler.step(Batch((request, 0, 8), (stays, 0, 8)))
    scheduler.get_next_batch_to_run()
    assert not events_of(audit, ev.Finished)

    vars(request).update(reasons, is_retracted=True)
    scheduler.running_batch = Batch((stays, 8, 1), extends=False)
    scheduler.get_next_batch_to_run()
    (finished,) = events_of(audit, ev.Finished)
    assert (finished.request, finished.reason) == (0, outcome)


def test_a_request_that_is_aborted_in_its_prompt_ends_before_the_chunk_in_flight_is_delivered() -> None:
    scheduler, request = Scheduler(), Request("a", prompt=8)
    audit = attach(scheduler)
    scheduler._add_request_to_queue(request)
    chunk = Batch((request, 0, 4))
    scheduler.run_batch(chunk)
    request.finished_reason = SimpleNamespace(to_json=lambda: {"type": "abort"})
    scheduler.get_next_batch_to_run()
    scheduler.process_batch_result(chunk, None)

    assert audit.verdict == "clean"
    assert audit.totals.of("overrun") == 4


@pytest.mark.parametrize(
    ("is_retracted", "choosing", "cause"),
    [(True, True, "blocks"), (False, True, "priority"), (False, False, "pause")],
)
def test_a_retraction_names_its_cause(is_retracted: bool, choosing: bool, cause: str) -> None:
    scheduler, request = Scheduler(), Request("a", prompt=8, outputs=3)
    audit = attach(scheduler)
    scheduler._add_request_to_queue(request)
    scheduler.step(Batch((request, 0, 8)))

    if choosing:
        scheduler.retracts.append((request, is_retracted))
        scheduler.get_next_batch_to_run()
    else:
        scheduler.retract(request, is_retracted)

    (preempted,) = events_of(audit, ev.Preempted)
    assert preempted.cause == cause


def test_an_output_of_a_request_that_ended_a_step_before_is_overrun() -> None:
    """With overlap the next step runs before the output that ends the request is taken."""
    scheduler, request = Scheduler(), Request("a", prompt=4, outputs=1)
    audit = attach(scheduler)
    scheduler._add_request_to_queue(request)
    first, second = Batch((request, 0, 4)), Batch((request, 4, 1), extends=False)
    scheduler.run_batch(first)
    scheduler.run_batch(second)
    scheduler.process_batch_result(first, None)
    request.sampling_params.max_new_tokens = -1
    scheduler.process_batch_result(second, None)

    assert audit.verdict == "clean"
    assert audit.totals.of("overrun") == 1


def test_the_first_batch_of_the_overlap_loop_of_0_5_3_has_no_requests() -> None:
    scheduler, request = Scheduler(), Request("a", prompt=4, outputs=2)
    audit = attach(scheduler)
    scheduler._add_request_to_queue(request)
    batch = Batch((request, 0, 4))
    scheduler.run_batch(batch)
    dummy = Batch()
    dummy.reqs = []
    scheduler.process_batch_result(dummy, None)
    assert not events_of(audit, ev.Delivered)

    scheduler.process_batch_result(batch, None)
    assert len(events_of(audit, ev.Delivered)) == 1


@pytest.mark.parametrize(("succeeds", "kind"), [(True, ev.DECLARED), (False, ev.POSSIBLE)])
def test_an_update_of_the_weights_is_a_change_if_it_succeeded(succeeds: bool, kind: str) -> None:
    scheduler: Any = Scheduler()
    scheduler.tp_worker = SimpleNamespace(update_weights_from_disk=lambda message: (succeeds, "why"))
    audit = attach(scheduler)
    scheduler.tp_worker.update_weights_from_disk("model")

    (changed,) = events_of(audit, ev.WeightsChanged)
    assert (changed.by, changed.version, changed.kind) == ("update_weights_from_disk", 1, kind)


def test_where_only_a_message_tells_of_an_update_it_is_a_possible_change() -> None:
    scheduler = Scheduler()
    audit = attach(scheduler)
    scheduler.process_input_requests([UpdateWeightFromDiskReqInput()])

    (changed,) = events_of(audit, ev.WeightsChanged)
    assert (changed.by, changed.kind) == ("UpdateWeightFromDisk", ev.POSSIBLE)


@pytest.mark.parametrize("level", ["blocks", "content"])
def test_higher_levels_are_refused_in_a_sentence(level: str) -> None:
    with pytest.raises(LedgerError, match=f"at level tokens, not {level}: its slots have no reference"):
        attach(Scheduler(), level=level)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding"),
        ({"disaggregation_mode": "decode"}, "different engines"),
        ({"pp_size": 2}, "pipeline stages"),
    ],
)
def test_what_is_not_observed_is_refused(arguments: dict[str, Any], what: str) -> None:
    scheduler = Scheduler(**arguments)
    with pytest.raises(LedgerError, match=what):
        attach(scheduler)
    assert "run_batch" not in vars(scheduler)


def test_a_scheduler_is_restored_when_it_is_detached() -> None:
    scheduler = Scheduler()
    with attach(scheduler):
        assert "run_batch" in vars(scheduler)
    assert not {"run_batch", "process_batch_result", "_add_request_to_queue"} & set(vars(scheduler))


def test_an_exception_of_a_hook_never_reaches_the_engine() -> None:
    scheduler, request = Scheduler(), Request("a")
    audit = attach(scheduler)
    del request.sampling_params
    scheduler._add_request_to_queue(request)

    assert request in scheduler.waiting_queue
    assert audit.verdict == "unknown"


def test_a_request_that_runs_when_the_observation_begins_is_unknown() -> None:
    scheduler, request = Scheduler(), Request("a", prompt=4, outputs=3)
    batch = Batch((request, 0, 4))
    scheduler.step(batch)
    scheduler.running_batch = batch  # type: ignore[assignment]
    audit = attach(scheduler)
    scheduler.step(Batch((request, 4, 1), extends=False))
    scheduler.step(Batch((request, 5, 1), extends=False))

    assert audit.verdict == "unknown"
    assert not audit.violations


def test_the_plugin_observes_one_of_the_tensor_parallel_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    registered: list[tuple[Any, ...]] = []
    module: Any = ModuleType("sglang.srt.plugins.hook_registry")
    module.HookRegistry = SimpleNamespace(register=lambda *given: registered.append(given))
    module.HookType = SimpleNamespace(AFTER="after")
    for name in ("sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    observed: list[Any] = []
    monkeypatch.setattr(plugin, "observe", observed.append)

    monkeypatch.delenv("KVLEDGER_DIR", raising=False)
    plugin.install_in_sglang()
    assert not registered

    monkeypatch.setenv("KVLEDGER_DIR", str(tmp_path))
    plugin.install_in_sglang()
    ((name, made, when),) = registered
    assert (name, when) == ("sglang.srt.managers.scheduler.Scheduler.__init__", "after")
    first, second = Scheduler(), Scheduler()
    second.attn_tp_rank = 1
    made(None, first)
    made(None, second)
    assert observed == [first]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("simulate",), "only vLLM's can be driven"),
        (("repro", "--finding", "tokens/negative"), "only vLLM's can be driven"),
        (("why", "turns"), "SGLang is observed at level tokens only"),
        (("whatif",), "SGLang is observed at level tokens only"),
    ],
)
def test_commands_for_blocks_and_for_vllm_refuse_in_a_sentence(
    command: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler, request = Scheduler(), Request("a", prompt=4, outputs=1)
    audit = attach(scheduler)
    scheduler._add_request_to_queue(request)
    request.cached_tokens = 9
    scheduler.step(Batch((request, 0, 4)))
    audit.detach()
    audit.save(tmp_path / "journal")

    assert exit_code(*command, tmp_path / "journal") == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_fleet_of_both_engines_is_one_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scheduler, request = Scheduler(), Request("a", prompt=8, outputs=1)
    with attach(scheduler) as audit:
        scheduler._add_request_to_queue(request)
        request.cached_tokens = 6
        scheduler.step(Batch((request, 6, 2)))
    audit.save(tmp_path / "fleet" / "sglang")
    journals.clean(tmp_path / "fleet" / "vllm")

    assert exit_code("summary", tmp_path / "fleet", "--by", "engine", "--format", "csv") == 0
    rows = capsys.readouterr().out
    assert "sglang 0.5.23" in rows
    assert "vllm 0.32.0" in rows
    collected = collect(journals.followed_audits(tmp_path / "fleet"))
    (engines,) = [samples for metric, samples in collected if metric.name == "kvledger_engine"]
    assert {"sglang", "vllm"} == {label for sample in engines for label in sample.labels} & {"sglang", "vllm"}


def test_protected_slots_are_told_every_few_seconds_at_rest() -> None:
    now = [0]
    told: list[ev.Event] = []
    sink: Any = SimpleNamespace(
        record=told.append, record_all=told.extend, keep=list, restart=lambda *_: None, wants_snapshot=False
    )
    scheduler, request = Scheduler(), Request("a", outputs=1)
    observer = SGLangObserver(scheduler, sink, version="0.5.23", clock=lambda: now[0])
    observer.start()
    scheduler._add_request_to_queue(request)
    scheduler.step(Batch((request, 0, 8)))
    scheduler.protected = 7
    for _ in range(20):
        now[0] += 1_000_000_000
        scheduler.get_next_batch_to_run()
    observer.stop("detached")

    censuses = [each for each in told if isinstance(each, ev.Census)]
    assert [each.protected_slots for each in censuses if each.protected_slots] == [7] * 5
