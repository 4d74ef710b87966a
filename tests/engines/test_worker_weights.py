"""Which calls that change weights a worker in a process of its own records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvledger.audit.engines.worker_weights import WorkerCalls
from kvledger.audit.events import MODEL_LOADS, EngineStarted, WorkerWeights
from kvledger.audit.journal.memory_recorder import MemoryRecorder


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


def test_a_call_that_fails_raises_and_is_recorded():
    observed = Observed()
    with pytest.raises(ValueError, match="no weights"):
        observed.worker.reload_weights(None)
    assert [("reload_weights", 1, True)] == observed.calls()


def test_a_recorder_that_cannot_be_opened_harms_no_call():
    observed = Observed()
    observed.opened = None  # type: ignore[assignment]
    WorkerCalls(observed.worker, lambda: 1 / 0, "0.32.0", digests=False)
    assert "done" == observed.worker.reload_weights()


def adapter(path: str = "adapter", *, in_place: bool = False) -> Any:
    return SimpleNamespace(lora_int_id=1, lora_path=path, load_inplace=in_place)


def test_the_first_load_of_an_adapter_is_counted_and_not_recorded():
    observed = Observed()
    observed.worker.add_lora(adapter())
    assert [] == observed.sinks
    observed.worker.add_lora(adapter())
    assert [("add_lora", 2, False)] == observed.calls()


def test_an_adapter_that_is_replaced_in_place_is_recorded_also_if_that_fails():
    """A request may have loaded it before, which is no call of its own."""
    observed = Observed()
    with pytest.raises(ValueError, match="no adapter"):
        observed.worker.add_lora(adapter("", in_place=True))
    assert [("add_lora", 1, True)] == observed.calls()
