"""The entry point that vLLM calls in every process: inert, idempotent, and nothing leaves it."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config.scheduler import SchedulerConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.core import EngineCore

from kvledger.audit.engines import choose, host_version
from kvledger.audit.engines.v1_since_0_27 import V1Observer
from kvledger.audit.entry import plugin
from kvledger.audit.entry.variables import VARIABLES
from kvledger.audit.journal.catalogue import find_journals
from kvledger.audit.journal.host_folders import read
from kvledger.audit.replay.journals import audit_paths
from kvledger.audit.traffic.driver import Driver, EngineSetup


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put vLLM's classes back afterwards, as no process ever needs to."""
    chooser = SchedulerConfig.get_scheduler_cls
    chosen = [_chosen(asynchronous) for asynchronous in (False, True)]
    inits = [cls.__dict__.get("__init__") for cls in chosen]
    maker = KVConnectorFactory.__dict__["create_connector"]
    ending, core_ending = engine_utils.shutdown, EngineCore.shutdown
    yield
    engine_utils.shutdown = ending
    EngineCore.shutdown = core_ending  # type: ignore[method-assign]
    SchedulerConfig.get_scheduler_cls = chooser
    KVConnectorFactory.create_connector = maker
    for cls, init in zip(chosen, inits, strict=True):
        if init is None:
            if "__init__" in cls.__dict__:
                del cls.__init__
        else:
            cls.__init__ = init


def _chosen(asynchronous: bool) -> Any:
    config = Driver(EngineSetup(asynchronous=asynchronous)).scheduler.vllm_config.scheduler_config
    return SchedulerConfig.get_scheduler_cls(config)


def test_the_entry_point_is_the_plugin() -> None:
    found = [e for e in entry_points(group="vllm.general_plugins") if e.name == "kvledger"]

    assert ["kvledger.audit.entry.plugin:install"] == [entry.value for entry in found]


def test_inert_without_a_folder(untouched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVLEDGER_DIR", raising=False)
    chooser = SchedulerConfig.get_scheduler_cls
    plugin.install()

    assert chooser is SchedulerConfig.get_scheduler_cls


def test_installing_twice_is_installing_once(
    untouched: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVLEDGER_DIR", str(tmp_path))
    plugin.install()
    chooser = SchedulerConfig.get_scheduler_cls
    plugin.install()

    assert chooser is SchedulerConfig.get_scheduler_cls
    init = _chosen(False).__init__
    assert init is _chosen(False).__init__


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_scheduler_made_after_it_was_chosen_writes_one_journal(
    asynchronous: bool, untouched: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """AsyncScheduler inherits from Scheduler: both are chosen here, and none is watched twice."""
    monkeypatch.setenv("KVLEDGER_DIR", str(tmp_path))
    plugin.install()
    _chosen(False), _chosen(True)
    for folder in tmp_path.iterdir():  # the schedulers that _chosen made
        assert folder.is_dir()
    before = set(tmp_path.iterdir())

    driver = Driver(EngineSetup(asynchronous=asynchronous))
    driver.add("r", 100, 4)
    driver.run()
    driver.scheduler.shutdown()

    (journal,) = set(tmp_path.iterdir()) - before
    (folder,) = find_journals([journal])
    names = [type(event).__name__ for _, event in read(folder)]
    assert ["EngineStarted", "Snapshot", "RequestAdded"] == names[:3]
    assert "EngineStopped" == names[-1]
    assert "clean" == audit_paths([journal]).verdict


def test_nothing_leaves_the_entry_point(
    untouched: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("a broken plugin")

    monkeypatch.setenv("KVLEDGER_DIR", "/nowhere")
    monkeypatch.setattr(plugin, "_install", broken)
    with caplog.at_level(logging.WARNING, logger="kvledger"):
        plugin.install()

    assert ["kvledger is off: RuntimeError: a broken plugin"] == [
        record.message for record in caplog.records if record.name == "kvledger"
    ]


@pytest.mark.parametrize("folder", ["/proc/nowhere", "/dev/null/nowhere"])
def test_a_folder_that_cannot_be_made_leaves_the_engine_running(
    folder: str, untouched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLEDGER_DIR", folder)
    plugin.install()
    _chosen(False)
    driver = Driver(EngineSetup())
    driver.add("r", 100, 4)
    driver.run()

    assert 4 == sum(len(output.new_token_ids) for output in driver.delivered["r"])


def test_a_host_that_does_not_fit_runs_on_unobserved(
    untouched: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("KVLEDGER_DIR", str(tmp_path))
    scheduler = Driver(EngineSetup()).scheduler
    scheduler.schedule = lambda surprise, more: None
    with caplog.at_level(logging.WARNING, logger="kvledger"):
        assert plugin.observe(scheduler) is None

    (record,) = [record for record in caplog.records if record.name == "kvledger"]
    assert "kvledger is off" in record.message
    assert "schedule takes (surprise, more)" in record.message
    assert [] == list(tmp_path.iterdir())


@pytest.fixture
def engine_log() -> Iterator[list[str]]:
    """The lines that reach vLLM's own logger, at its level."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_one_line_in_the_engines_log_says_that_observation_began(
    untouched: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine_log: list[str]
) -> None:
    monkeypatch.setenv("KVLEDGER_DIR", str(tmp_path))
    observer: Any = plugin.observe(Driver(EngineSetup()).scheduler)

    (line,) = [line for line in engine_log if "kvledger" in line]
    journal = observer.log.sink.folder
    assert tmp_path == journal.parent
    assert line.startswith(f"INFO kvledger observes vLLM {host_version()}: adapter v1")
    assert line.endswith(f"level tokens, journal {journal}")


def test_one_line_in_the_engines_log_says_why_observation_ended(
    untouched: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine_log: list[str]
) -> None:
    monkeypatch.setenv("KVLEDGER_DIR", str(tmp_path))
    observer: Any = plugin.observe(Driver(EngineSetup()).scheduler)
    observer.shutting_down()
    observer.stop("exit")

    assert ["INFO kvledger ends its observation: the engine shuts down"] == engine_log[-1:]
    assert 1 == sum("ends its observation" in line for line in engine_log)


def test_a_log_handler_that_fails_does_not_stop_the_engine(
    untouched: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(reason: str) -> None:
        raise OSError(reason)

    monkeypatch.setenv("KVLEDGER_DIR", str(tmp_path))
    driver = Driver(EngineSetup())
    observer: Any = plugin.observe(driver.scheduler)
    observer.on_stopped = broken

    driver.scheduler.shutdown()


def test_a_misspelt_variable_is_logged_once_with_the_nearest_name(
    untouched: None, monkeypatch: pytest.MonkeyPatch, engine_log: list[str]
) -> None:
    """The misspelt KVLEDGER_DIR leaves the plugin without a folder: nothing else would tell."""
    monkeypatch.setattr(plugin, "_has_named", False)
    monkeypatch.delenv("KVLEDGER_DIR", raising=False)
    monkeypatch.setenv("KVLEDGER_DIRR", "/var/lib/kvledger")
    monkeypatch.setenv("KVLEDGER_LEVEL", "blocks")
    plugin.install()
    plugin.install()

    (line,) = engine_log
    assert line.startswith("WARNING kvledger does not know the environment variable KVLEDGER_DIRR;")
    assert line.endswith("the nearest name is KVLEDGER_DIR")


def test_the_table_has_every_variable_that_the_package_reads() -> None:
    package = Path(plugin.__file__).resolve().parents[2]
    files = [
        *package.glob("*.py"),
        *(p for name in ("audit", "exporters") for p in (package / name).rglob("*.py")),
    ]
    named = {name for path in files for name in re.findall(r"\bKVLEDGER_[A-Z_]+", path.read_text())}

    assert set() == named - set(VARIABLES) - {"KVLEDGER_"}


def test_a_hook_that_is_removed_is_logged_once(
    untouched: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine_log: list[str]
) -> None:
    """Without the text of the exception, which may hold what a client sent."""

    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("a client's text")

    monkeypatch.setenv("KVLEDGER_DIR", str(tmp_path))
    driver = Driver(EngineSetup())
    monkeypatch.setattr(V1Observer.PARTS.steps, "scheduled", broken)
    plugin.observe(driver.scheduler)
    driver.add("r", 100, 20)
    driver.run()

    (line,) = [line for line in engine_log if line.startswith("WARNING kvledger")]
    assert line.endswith("its hook on schedule kept failing, at last with ValueError")


def test_a_name_tells_engines_of_two_hosts_apart(
    untouched: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In containers both may have process id 1."""
    monkeypatch.setenv("KVLEDGER_DIR", str(tmp_path))
    names = []
    for name in ("prefill\x1b[31m-0", ""):
        monkeypatch.setenv("KVLEDGER_NAME", name)
        observer: Any = plugin.observe(Driver(EngineSetup()).scheduler)
        observer.log.sink.close()
        names.append(audit_paths([observer.log.sink.folder]).engines[0].name)

    process = f"vllm {host_version()} pid {os.getpid()} on"
    assert [f"{process} prefill[31m-0", f"{process} {socket.gethostname()}"] == names


def test_the_adapter_fits_this_host() -> None:
    assert choose(Driver(EngineSetup()).scheduler).NAME
