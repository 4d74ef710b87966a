"""A pytest plugin for `make proof NAME=upstream ARGS=--level=content`: vLLM's own tests at level `content`.

`-p upstream_contents` beside `--kvledger`. An engine that a test builds in this process has its model runner
observed. A scheduler without a worker gets a runner with KV caches and no model, which writes random KV at
every position that a step computes; it executes a step when the test delivers its output, or before the next
step. The counts of hit blocks are a property of each test.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import sys
from collections import deque
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvledger.audit.engines.content.attached import watch_content
from kvledger.audit.entry.pytest_observer import CORE, SCHEDULER, LedgerPlugin

ROOT = Path(__file__).resolve().parents[2]
COUNTS = "kvledger.contents"
"""The name of the property with the counts, as JSON."""
REFUSED = "refused"
"""The count of schedulers that level `content` refused."""


def load_kv_runner() -> ModuleType:
    """The module with the runner. Its package has the name that vLLM's tests have."""
    path = ROOT / "tests" / "scenarios" / "kv_runner.py"
    spec = importlib.util.spec_from_file_location("kvledger_kv_runner", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def runner_class() -> Any:
    """A runner that leaves the test's connector alone."""

    class Runner(load_kv_runner().KVRunner):  # type: ignore[misc]
        def note_local_hits(self, connector: Any) -> None:
            """Tests count the calls of their connectors."""

        def fill_loads(self, output: Any) -> None:
            """A test's connector may be of any kind; what it loads keeps the bytes that stand there."""

    return Runner


class Execution:
    """The steps of one scheduler that no worker executes."""

    def __init__(self, scheduler: Any) -> None:
        self.runner = runner_class()(scheduler)
        self.asynchronous = bool(getattr(scheduler.vllm_config.scheduler_config, "async_scheduling", False))
        self._planned: deque[Any] = deque()
        """Steps that are not executed yet, oldest first."""

    def planned(self, output: Any) -> None:
        """A step was scheduled."""
        if not self._planned or self._planned[-1] is not output:
            self._planned.append(output)

    def execute(self, *, kept: int = 0) -> None:
        """Execute the planned steps but the last ``kept``."""
        while len(self._planned) > kept:
            self.runner.execute_model(self._planned.popleft())

    def delivered(self, output: Any, result: Any) -> None:
        """A test delivers the output of a step, which is executed first, and so are those before it."""
        connector_output = getattr(result, "kv_connector_output", None)
        self.runner.load_errors = set(getattr(connector_output, "invalid_block_ids", None) or ())
        while any(step is output for step in self._planned):
            self.runner.execute_model(self._planned.popleft())
        self.runner.load_errors = set()
        drafts = output.scheduled_spec_decode_tokens if self.asynchronous else {}
        for request_id, tokens in drafts.items():
            place = result.req_id_to_index.get(request_id)
            if place is not None:
                accepted = max(0, len(result.sampled_token_ids[place]) - 1)
                self.runner.rejected(request_id, len(tokens) - accepted)


class ContentPlugin(LedgerPlugin):
    """Observes the engines of a test at level `content`."""

    def __init__(self) -> None:
        super().__init__(stacks=False)
        self._refused = 0

    def _wrap(self) -> None:
        if "vllm" in sys.modules:  # a test may import these modules later only
            for name in (SCHEDULER, CORE):
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
        scheduler = getattr(sys.modules.get(SCHEDULER), "Scheduler", None)
        if scheduler is not None and not any(scheduler is wrapped for wrapped, *_ in self._wrapped):
            self._execute_steps(scheduler)
            self._observe_instances(scheduler, self._expect_first_step)
        super()._wrap()

    def _execute_steps(self, class_: Any) -> None:
        """Execute the steps of schedulers without a worker."""
        schedule, update = class_.schedule, class_.update_from_output

        @functools.wraps(schedule)
        def scheduled(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            execution = vars(scheduler).get("kvledger_execution")
            if execution is not None:
                execution.execute(kept=1 if execution.asynchronous else 0)
            result = schedule(scheduler, *args, **kwargs)
            execution = vars(scheduler).get("kvledger_execution")
            if execution is not None:
                execution.planned(result)
            return result

        @functools.wraps(update)
        def updated(scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
            execution = vars(scheduler).get("kvledger_execution")
            if execution is not None:
                execution.delivered(scheduler_output, model_runner_output)
            return update(scheduler, scheduler_output, model_runner_output)

        self._set(class_, "schedule", scheduled)
        self._set(class_, "update_from_output", updated)

    def _keep(self, observer: Any, sink: Any) -> None:
        super()._keep(observer, sink)
        scheduler = getattr(observer, "scheduler", None)
        if scheduler is None or not hasattr(observer, "content"):
            return
        worker = self._worker(scheduler)
        if worker is not None:
            observer.watch_content(worker)
        else:
            scheduler.kvledger_execution = Execution(scheduler)
            runner = scheduler.kvledger_execution.runner
            observer.content = watch_content(observer, SimpleNamespace(model_runner=runner), runner)
            if observer.content is not None:
                observer.content.begin_segment()
        self._refused += observer.content is None

    def _report(self, item: pytest.Item) -> str:
        audited = list(self._audited)
        text = super()._report(item)
        sums: dict[str, int] = {REFUSED: self._refused}
        self._refused = 0
        for instance in audited:
            ledger = instance.auditor.ledger
            sums["watched"] = sums.get("watched", 0) + bool(ledger.contents.watches)
            for name, count in ledger.sums.contents.items():
                sums[name] = sums.get(name, 0) + count
        item.user_properties.append((COUNTS, json.dumps(sums)))
        return text


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Take the place of the plugin that observes at level `blocks`."""
    name = "kvledger-observer"
    plain = config.pluginmanager.get_plugin(name)
    assert plain is not None, "--kvledger=blocks is missing"
    config.pluginmanager.unregister(plain)
    config.pluginmanager.register(ContentPlugin(), name)
