"""Which calls of an engine core or of a worker change weights, and how the changes are numbered."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from kvledger.audit.engines import weights_watch
from kvledger.audit.engines.step_log import StepLog
from kvledger.audit.engines.weights_watch import WeightsWatch, WorkerCalls, mark_weights
from kvledger.audit.events import (
    DECLARED,
    DETECTED,
    LABELLED,
    LOOK,
    MODEL_LOADS,
    POSSIBLE,
    EngineStarted,
    WeightsChanged,
    WorkerWeights,
)
from kvledger.audit.journal.recorder import MemoryRecorder

# --- which calls of an engine core change weights, and how the changes are numbered -----------------------


class EngineCore:
    """The methods of vLLM's class that are wrapped."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> list[str]:
        if method == "fails":
            raise ValueError("no such method")
        return ["done"]

    def add_lora(self, lora_request: Any) -> bool:
        if lora_request.lora_path == "fails":
            raise ValueError("no such adapter")
        return True

    def remove_lora(self, lora_id: int) -> bool:
        return True

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        return None

    def wake_up(self, tags: Any = None) -> None:
        return None

    def set_weight_version(self, weight_version: str) -> None:
        return None


class Scheduler:
    vllm_config: Any = None


class Engine:
    """An observed engine core. ``step`` is the number of its last step."""

    def __init__(self) -> None:
        self.step, self.sink, self.failures = 0, MemoryRecorder(), []
        scheduler = Scheduler()
        self.core: Any = EngineCore(scheduler)
        self.watch = WeightsWatch(scheduler, StepLog(self.sink), lambda: self.step, self.failed)
        self.watch.start(digests=False)

    def failed(self, *failure: Any, **_: Any) -> None:
        self.failures.append(failure)

    def changes(self) -> list[tuple[int, str, str]]:
        events = [each for each in self.sink.take() if isinstance(each, WeightsChanged)]
        assert not self.failures
        return [(each.version, each.by, each.kind) for each in events]


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Observe no engine of another test."""
    monkeypatch.setattr(weights_watch, "engine_core", lambda: EngineCore)
    monkeypatch.setattr(weights_watch, "_watches", WeakKeyDictionary())
    monkeypatch.setattr(weights_watch, "_covered", {})


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch):
    alone(monkeypatch)
    engine = Engine()
    yield engine
    engine.watch.remove()


def adapter(name: str, number: int, path: str = "", **more: Any) -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path, **more)


@pytest.mark.parametrize(
    "method", ["reload_weights", "update_weights", "finish_weight_update", "reset_weights"]
)
def test_a_call_whose_purpose_it_is_changes_weights(engine, method):
    assert ["done"] == engine.core.collective_rpc(method)
    assert [(1, method, DECLARED)] == engine.changes()


@pytest.mark.parametrize("method", ["profile", "check_health", "get_model", "synchronize_device", "sleep"])
def test_a_harmless_call_is_not_recorded(engine, method):
    engine.core.collective_rpc(method)
    assert [] == engine.changes()


def test_a_function_of_the_caller_may_change_weights(engine):
    def scale(worker: Any) -> None: ...

    engine.core.collective_rpc(scale)
    engine.core.collective_rpc("my_extension", args=(1,))
    assert [(1, "scale", POSSIBLE), (1, "my_extension", POSSIBLE)] == engine.changes()


def test_a_call_that_fails_raises_and_is_recorded(engine):
    with pytest.raises(ValueError, match="no such method"):
        engine.core.collective_rpc("fails")
    assert [(1, "fails", POSSIBLE)] == engine.changes()


def test_changes_without_a_step_between_have_one_number(engine):
    engine.core.collective_rpc("update_weights")
    engine.core.collective_rpc("update_weights")
    engine.core.set_weight_version("new")
    engine.step += 1
    engine.core.collective_rpc("update_weights")
    assert [1, 1, 1, 2] == [version for version, _, _ in engine.changes()]


def test_weights_of_the_draft_model_are_not_those_of_requests(engine):
    engine.core.collective_rpc("start_draft_weight_update")
    engine.core.collective_rpc("update_weights")
    engine.core.collective_rpc("finish_weight_update")
    assert {"draft model": 1} == engine.watch.versions


def test_a_label_alone_changes_nothing(engine):
    engine.core.set_weight_version("step 7")
    assert [(0, "set_weight_version", LABELLED)] == engine.changes()


@pytest.mark.parametrize(
    ("level", "tags", "changes"),
    [(2, None, 1), (2, ["weights"], 1), (2, ["kv_cache"], 0), (1, None, 0), (0, ["scheduling"], 0)],
)
def test_weights_are_gone_after_a_sleep_that_discards_them(engine, level, tags, changes):
    engine.core.sleep(level)
    engine.core.wake_up(tags)
    assert changes == len(engine.changes())


def test_an_adapter_that_is_loaded_first_changes_nothing(engine):
    engine.core.add_lora(adapter("sql", 1))
    assert [] == engine.changes()


def test_an_adapter_in_place_is_compared_by_its_files(engine, tmp_path: Path):
    (tmp_path / "adapter.safetensors").write_text("one")
    engine.core.add_lora(adapter("sql", 1, str(tmp_path)))
    engine.core.add_lora(adapter("sql", 1, str(tmp_path), load_inplace=True))
    (tmp_path / "adapter.safetensors").write_text("another")
    engine.core.add_lora(adapter("sql", 1, str(tmp_path), load_inplace=True))

    assert [(0, "add_lora", DECLARED), (1, "add_lora", DECLARED)] == engine.changes()
    assert {"sql": 1} == engine.watch.versions


@pytest.mark.parametrize("removed", [True, False])
def test_an_adapter_that_a_request_loaded_is_compared_too(engine, tmp_path: Path, removed: bool):
    (tmp_path / "adapter.safetensors").write_text("one")
    engine.watch.adapter_used(adapter("sql", 1, str(tmp_path)))
    (tmp_path / "adapter.safetensors").write_text("another")
    if removed:
        engine.core.remove_lora(1)
    engine.core.add_lora(adapter("sql", 1, str(tmp_path), load_inplace=not removed))

    assert [(1, "add_lora", DECLARED)] == engine.changes()


def test_an_adapter_that_a_request_loads_in_place_is_compared_each_time(engine, tmp_path: Path):
    """vLLM's server keeps the word for all later requests up to 0.32: most of them change nothing."""
    (tmp_path / "adapter.safetensors").write_text("one")
    first, again = adapter("sql", 1, str(tmp_path)), adapter("sql", 1, str(tmp_path), load_inplace=True)
    for request in (first, again):
        engine.watch.adapter_used(request)
        engine.watch.adapter_runs(request)
    (tmp_path / "adapter.safetensors").write_text("another")
    engine.watch.adapter_runs(first)
    assert [] == engine.changes()

    for _ in range(2):
        engine.watch.adapter_used(again)
        engine.watch.adapter_runs(again)
    assert [(1, "add_adapter", DECLARED)] == engine.changes()


def test_a_removed_adapter_that_a_request_loads_again_is_compared(engine, tmp_path: Path):
    (tmp_path / "adapter.safetensors").write_text("one")
    engine.core.add_lora(adapter("sql", 1, str(tmp_path)))
    engine.core.remove_lora(1)
    (tmp_path / "adapter.safetensors").write_text("another")
    for _ in range(2):
        engine.watch.adapter_runs(adapter("sql", 1, str(tmp_path)))
    assert [(1, "add_adapter", DECLARED)] == engine.changes()


@pytest.mark.parametrize("how", [{}, {"lora_tensors": {}}])
def test_what_a_request_loads_in_place_and_cannot_be_compared_may_have_changed(engine, how: dict[str, Any]):
    engine.core.add_lora(adapter("sql", 1, "organisation/sql", **how))
    engine.watch.adapter_runs(adapter("sql", 1, "organisation/sql", load_inplace=True, **how))
    assert [(1, "add_adapter", POSSIBLE)] == engine.changes()


def test_an_adapter_that_was_removed_and_added_again_may_have_changed(engine):
    engine.core.add_lora(adapter("sql", 1, "organisation/sql"))
    engine.core.remove_lora(1)
    engine.core.add_lora(adapter("sql", 2, "organisation/sql"))
    assert [(1, "add_lora", POSSIBLE)] == engine.changes()


@pytest.mark.parametrize(("workers", "changes"), [(1, []), (2, [(1, "add_lora", POSSIBLE)])])
def test_an_adapter_that_one_of_several_workers_could_not_load_may_have_changed_on_others(
    engine, workers: int, changes: list[Any]
):
    parallel = SimpleNamespace(world_size=workers)
    engine.core.scheduler.vllm_config = SimpleNamespace(parallel_config=parallel)
    engine.core.add_lora(adapter("sql", 1))
    with pytest.raises(ValueError, match="no such adapter"):
        engine.core.add_lora(adapter("sql", 1, "fails", load_inplace=True))
    assert changes == engine.changes()


def test_an_adapter_of_tensors_that_is_added_again_has_changed(engine):
    engine.core.add_lora(adapter("policy", 1, lora_tensors={}))
    engine.core.remove_lora(1)
    engine.core.add_lora(adapter("policy", 1, lora_tensors={}))
    assert [(1, "add_lora", DECLARED)] == engine.changes()


def test_a_mark_reaches_every_observed_engine(engine):
    other = Engine()
    assert 2 == mark_weights("step 8")
    assert [(1, "mark_weights", DECLARED)] == engine.changes() == other.changes()
    other.watch.remove()


def test_the_class_is_restored_with_the_last_engine(monkeypatch: pytest.MonkeyPatch):
    alone(monkeypatch)
    before = dict(vars(EngineCore))
    one, two = Engine(), Engine()
    one.watch.remove()
    assert before["collective_rpc"] is not EngineCore.collective_rpc
    two.watch.remove()
    assert before == dict(vars(EngineCore))


def test_a_mark_never_raises(engine, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(engine.sink, "record", full)
    monkeypatch.setattr(engine.watch, "_failed", full)
    assert 1 == mark_weights()


def test_a_hook_that_fails_is_told_and_the_call_returns(engine):
    engine.watch._rpc = None  # type: ignore[assignment]
    assert ["done"] == engine.core.collective_rpc("reload_weights")
    assert "collective_rpc" == engine.failures[0][0]


class Digest:
    """Stands for the digest of a model. ``equal``: what the next comparisons say."""

    equal = True

    def looks_equal(self) -> bool:
        return self.equal

    def is_equal(self) -> bool:
        return self.equal


@pytest.fixture
def looking(engine):
    engine.watch._digests, engine.watch._look_us = [Digest()], 1.0
    engine.step += 1
    return engine


def test_a_look_is_recorded_whatever_it_finds(looking):
    looking.watch.look_now()
    looking.step, looking.watch._digests[0].equal = 2, False
    looking.watch.look_now()
    assert [(0, LOOK, DETECTED), (1, LOOK, DETECTED)] == looking.changes()


def test_a_second_look_before_a_step_is_none(looking):
    looking.watch.look_now()
    looking.watch.look_now()
    assert 1 == len(looking.changes())


def test_a_change_before_a_call_is_not_the_calls(looking):
    looking.watch._digests[0].equal = False
    looking.core.collective_rpc("check_health")
    assert [(1, LOOK, DETECTED)] == looking.changes()


def test_weights_that_are_not_in_memory_are_not_read(looking):
    looking.core.sleep(1)
    looking.step += 1
    looking.changes()
    looking.watch.look_now()
    assert [] == looking.changes()
    looking.core.wake_up(["kv_cache"])
    looking.watch.look_now()
    assert [] == looking.changes()
    looking.core.wake_up(["weights"])
    looking.watch.look_now()
    assert [(0, LOOK, DETECTED)] == looking.changes()


# --- which calls that change weights a worker in a process of its own records -----------------------------


class Model:
    def load_weights(self, weights: Any) -> None:
        if weights is None:
            raise ValueError("no weights")


class Worker:
    def __init__(self) -> None:
        parallel = SimpleNamespace(rank=1, data_parallel_rank=0, data_parallel_index=0, data_parallel_size=1)
        self.vllm_config = SimpleNamespace(parallel_config=parallel, instance_id="i", kv_transfer_config=None)
        self.model_runner = SimpleNamespace(model=Model())

    def add_lora(self, request: Any) -> bool:
        if not request.lora_path:
            raise ValueError("no adapter")
        return True

    def reload_weights(self, weights: Any = ()) -> str:
        self.model_runner.model.load_weights(weights)
        return "done"


class Observed:
    """An observed worker."""

    def __init__(self) -> None:
        self.worker, self.sinks = Worker(), list[MemoryRecorder]()
        WorkerCalls(self.worker, self.opened, "0.32.0", digests=False)

    def opened(self) -> MemoryRecorder:
        self.sinks.append(MemoryRecorder())
        return self.sinks[-1]

    def recorded(self) -> list[Any]:
        return [event for sink in self.sinks for event in sink.take()]

    def calls(self) -> list[tuple[str, int, bool]]:
        found = [each for each in self.recorded() if isinstance(each, WorkerWeights)]
        return [(each.by, each.call, each.raised) for each in found]


def test_a_worker_whose_weights_stay_has_no_journal():
    assert [] == Observed().sinks


def test_the_journal_names_the_worker_and_its_engine():
    observed = Observed()
    observed.worker.reload_weights()
    started = observed.recorded()[0]
    assert isinstance(started, EngineStarted)
    assert (1, "i-0") == (started.configuration["rank"], started.configuration["engine_key"])


def test_calls_are_counted_and_what_they_call_is_not():
    observed = Observed()
    assert "done" == observed.worker.reload_weights()
    observed.worker.reload_weights()
    observed.worker.model_runner.model.load_weights(())
    expected = [("reload_weights", 1, False), ("reload_weights", 2, False), (MODEL_LOADS, 1, False)]
    assert expected == observed.calls()


def test_a_failing_call_of_a_worker_raises_and_is_recorded():
    observed = Observed()
    with pytest.raises(ValueError, match="no weights"):
        observed.worker.reload_weights(None)
    assert [("reload_weights", 1, True)] == observed.calls()


def test_a_recorder_that_cannot_be_opened_harms_no_call():
    observed = Observed()
    observed.opened = None  # type: ignore[assignment]
    WorkerCalls(observed.worker, lambda: 1 / 0, "0.32.0", digests=False)
    assert "done" == observed.worker.reload_weights()


def lora_adapter(path: str = "adapter", *, in_place: bool = False) -> Any:
    return SimpleNamespace(lora_int_id=1, lora_path=path, load_inplace=in_place)


def test_the_first_load_of_an_adapter_is_counted_and_not_recorded():
    observed = Observed()
    observed.worker.add_lora(lora_adapter())
    assert [] == observed.sinks
    observed.worker.add_lora(lora_adapter())
    assert [("add_lora", 2, False)] == observed.calls()


def test_an_adapter_that_is_replaced_in_place_is_recorded_also_if_that_fails():
    """A request may have loaded it before, which is no call of its own."""
    observed = Observed()
    with pytest.raises(ValueError, match="no adapter"):
        observed.worker.add_lora(lora_adapter("", in_place=True))
    assert [("add_lora", 1, True)] == observed.calls()
