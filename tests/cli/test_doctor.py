"""``kvledger doctor``: its diagnosis of an environment, with stand-ins for vLLM and with the real one."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.command_line import exit_code
from tests.engines.stand_ins import stand_in

from kvledger.audit import engines
from kvledger.audit.checks.registry import catalogue
from kvledger.audit.engines import source_files
from kvledger.audit.engines.source_files import CacheDeclarations
from kvledger.audit.engines.v0.observer import V0Observer
from kvledger.audit.engines.v1_until_0_26 import V1Observer017
from kvledger.audit.entry import doctor
from kvledger.audit.events import ContentWatched, EngineStarted, Setting
from kvledger.audit.journal.writer import JournalWriter


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command in this process; its exit code and output."""

    def call(*words: str) -> tuple[object, str]:
        return exit_code("doctor", *words), capsys.readouterr().out

    return call


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """vLLM 0.17 as far as signatures go, and a folder to write to."""
    monkeypatch.setenv("KVLEDGER_DIR", str(tmp_path / "journals"))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(engines, "host_version", lambda: "0.17.0")
    monkeypatch.setattr(engines, "bare_scheduler", lambda: stand_in(V1Observer017))
    monkeypatch.setattr(engines, "output_fields", lambda: V1Observer017.OUTPUT)
    monkeypatch.setattr(engines, "host_source", lambda: None)  # only an import can tell
    seam = SimpleNamespace(get_scheduler_cls=None)
    monkeypatch.setattr(engines, "scheduler_config", lambda: seam)
    return seam


def test_doctor_exits_with_0_where_an_engine_would_be_observed(run: Any, host: Any) -> None:
    code, out = run()

    assert 0 == code
    assert "v1-0.17" in out
    assert out.startswith("An engine started here would be observed.\n")


@pytest.fixture
def v0(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The v0 scheduler, which reports no figures."""
    monkeypatch.setattr(engines, "host_version", lambda: "0.9.2.post2")
    monkeypatch.setattr(engines, "bare_scheduler", lambda: stand_in(V0Observer))


def test_the_json_has_every_invariant_as_checked_or_with_a_reason(run: Any, v0: Any) -> None:
    code, out = run("--format", "json")
    data = json.loads(out)

    assert 1 == code
    assert data["problems"] == ["The plugin does not reach the v0 scheduler of vLLM 0.9.2.post2."]
    assert set(catalogue()) == {*data["checked"], *data["not_checked"]}
    assert "tokens/set-once" in data["not_checked"]
    assert set(data["checked_in_part"]) < set(data["checked"])
    assert all(data["not_checked"].values())


def test_the_csv_has_one_line_per_invariant(run: Any, v0: Any) -> None:
    _, out = run("--format", "csv")
    lines = list(csv.DictReader(out.splitlines()))

    assert set(catalogue()) == {line["name"] for line in lines if line["topic"] in ("checked", "not_checked")}
    assert all(line["says"] for line in lines if line["topic"] == "not_checked")


def test_without_kvledger_dir_nothing_would_be_observed(
    run: Any, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVLEDGER_DIR")
    code, out = run()

    assert 1 == code
    assert "KVLEDGER_DIR is not set" in out


def test_a_folder_that_can_not_be_created_is_a_problem(
    run: Any, host: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVLEDGER_DIR", str(tmp_path / "file" / "journals"))
    code, out = run("--format", "json")

    assert 1 == code
    assert "no folder" in json.loads(out)["problems"][0]


def test_a_plugin_that_vllm_plugins_leaves_out_is_a_problem(
    run: Any, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "others,than_ours")
    code, out = run()

    assert 1 == code
    assert "leaves kvledger out" in out


def test_an_unknown_release_is_a_problem_that_names_the_difference(
    run: Any, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = stand_in(V1Observer017)
    del type(scheduler).add_request
    monkeypatch.setattr(engines, "bare_scheduler", lambda: scheduler)
    code, out = run("--format", "json")
    data = json.loads(out)

    assert 1 == code
    assert data["adapter"] is None
    assert "add_request is missing" in data["problems"][0]


def test_a_release_whose_scheduler_the_plugin_cannot_reach_is_a_problem(run: Any, host: Any) -> None:
    del host.get_scheduler_cls
    code, out = run("--format", "json")

    assert 1 == code
    assert "kvledger.attach" in json.loads(out)["problems"][0]


def test_a_missing_vllm_is_a_problem(run: Any, host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> str:
        raise ModuleNotFoundError("No module named 'vllm'")

    monkeypatch.setattr(engines, "host_version", absent)
    code, out = run("--format", "json")
    data = json.loads(out)

    assert 1 == code
    assert [None, [], []] == [data["versions"]["vllm"], data["hooks"], data["checked"]]
    assert "vLLM can't be imported" in data["problems"][0]


def test_no_engine_is_started(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("an engine was started")

    scheduler = stand_in(V1Observer017)
    monkeypatch.setattr(type(scheduler), "__init__", started)
    monkeypatch.setattr(engines, "bare_scheduler", lambda: scheduler)

    assert doctor.diagnose().observed


def test_the_answer_says_what_is_right_partial_and_missing(
    run: Any, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVLEDGER_DIR")
    _, out = run()
    states = {tuple(line.split()[:2]) for line in out.splitlines()}

    assert {("ok", "vLLM"), ("partly", "invariants"), ("ok", "plugin"), ("missing", "KVLEDGER_DIR")} <= states
    assert all(len(line) <= 100 for line in out.splitlines())


def test_a_problem_says_what_to_type(run: Any, host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVLEDGER_DIR")
    _, out = run()

    assert "KVLEDGER_DIR=~/kvledger vllm serve MODEL" in " ".join(out.split())


def test_the_known_faults_of_the_engine_here_come_after_the_answer(run: Any, host: Any) -> None:
    out = run()[1]

    known = out.split("\n\n")[2]
    assert known.startswith("vLLM 0.17.0: 28 known faults can concern an engine here")
    assert "its settings are not known" in known.partition("\n")[0]
    first = " ".join(known.split())
    assert (
        "- reset-drops-valid-token: a valid token is discarded after a reset of the prefix cache, if async "
        "scheduling is on and `reset_prefix_cache` preempts running requests. Fixed in 0.22.1." in first
    )


def write_engine_journal(folder: Path, version: str, **configuration: Setting) -> None:
    writer = JournalWriter(folder)
    writer.write([EngineStarted(0, 1e9, "vllm", version, "v1-0.17", "tokens", 1, configuration)])
    writer.close()


def fault_ids(data: dict[str, Any]) -> dict[str, str]:
    """The condition of each fault, by its id; drifts left out."""
    rows = [row for release in data["faults"]["releases"] for row in release["faults"]]
    return {row["id"]: row["condition"] for row in rows if row["kind"] == "fault"}


def test_the_settings_of_the_last_engine_rule_faults_out(run: Any, host: Any, tmp_path: Path) -> None:
    settings: dict[str, Setting] = {"asynchronous": False, "connector": None, "drafts": 3, "loras": 0}
    write_engine_journal(tmp_path / "journals" / "engine-1-1-0", "0.17.0", **settings)
    data = json.loads(run("--format", "json")[1])

    assert "engine-1-1-0" == data["faults"]["journal"]
    assert {
        "encoder-output-evicted": "if requests have images or other encoder inputs",
        "encoder-output-never-computed": "if requests have images or other encoder inputs, the scheduling "
        "policy is priority and a request is preempted",
        "encoder-space-credited": "if the model is an encoder-decoder, such as Whisper",
        "oversized-prompt": "if a prompt needs more blocks than the pool has",
        "rejection-of-a-past-life": "if a request is preempted",
        "resumed-before-its-output": "if three or more batches are in flight and a request is preempted",
        "session-skips-tokens": "if a client streams its input in chunks (a session)",
        "withdrawn-step-stays-cached": "if the scheduling policy is priority and a request is preempted",
    } == fault_ids(data)


def test_the_settings_of_another_release_do_not_count(run: Any, host: Any, tmp_path: Path) -> None:
    write_engine_journal(tmp_path / "journals" / "engine-1-1-0", "0.11.0", asynchronous=False)
    data = json.loads(run("--format", "json")[1])

    assert "" == data["faults"]["journal"]
    assert "reset-drops-valid-token" in fault_ids(data)


def test_of_a_release_that_was_never_examined_nothing_is_known(
    run: Any, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "host_version", lambda: "0.40.0")

    assert "\nNothing is known of vLLM 0.40.0: releases from 0.9.1 to 0.33.0 were examined.\n" in run()[1]


def test_the_csv_has_a_line_per_fault(run: Any, host: Any) -> None:
    lines = csv.DictReader(run("--format", "csv")[1].splitlines())
    says = {line["name"]: line["says"] for line in lines if line["topic"] == "faults"}

    assert (
        "an output placeholder is left after a failed synchronous load if async" in says["placeholder-leak"]
    )


DECLARED = CacheDeclarations(True, ("FullAttentionSpec", "CrossAttentionSpec"))


def write_worker_journal(folder: Path, *watches: ContentWatched) -> None:
    writer = JournalWriter(folder)
    writer.write([EngineStarted(0, 1e9, "vllm", "0.32.0", "content", "worker", 1, {}), *watches])
    writer.close()


def test_the_doctor_says_which_groups_are_checked_and_how_their_caches_lay_in_memory(
    run: Any, host: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "cache_declarations", lambda: DECLARED)
    layout = "CPUAttentionBackend, layout LBHNC, kernel blocks of 32 tokens, float32"
    excluded = "Group 1 is not checked: its blocks are of kind CrossAttentionSpec."
    watched = ContentWatched(1, 0, 0, 11, [0, 32, 2, 32768], "k", 1.0, [excluded], [layout])
    write_worker_journal(tmp_path / "journals" / "worker-1-1-0", watched)
    write_worker_journal(tmp_path / "journals" / "worker-2-1-0")  # newer, of another level

    _, text = run()
    line = " ".join(text.split())
    assert "partly contents places of blocks from strides of KVCacheTensor; 1 kind of KV caches" in line
    assert f"group 0: 11 blocks of 32 tokens and 32,768 bytes, 2 tensors; {layout}" in line
    assert excluded in line
    found = json.loads(run("--format", "json")[1])["contents"]
    assert ["FullAttentionSpec"] == found["checked"]
    assert {"CrossAttentionSpec": "blocks belong to encoder inputs"} == found["not_checked"]
    assert ("worker-1-1-0", [excluded]) == (found["journal"], found["excluded"])
    rows = {tuple(row[:2]): row[2] for row in csv.reader(run("--format", "csv")[1].splitlines())}
    assert "CrossAttentionSpec: blocks belong to encoder inputs" == rows["contents", "not_checked"]


def test_without_a_journal_the_doctor_names_the_kinds_of_caches_alone(
    run: Any, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "cache_declarations", lambda: DECLARED._replace(strides=False))
    line = " ".join(run()[1].split())
    assert (
        "ok contents places of blocks from shapes that attention backends declare; 1 kind of KV caches "
        "can be checked, 1 can't be also" in line
    )


def test_a_release_with_unknown_caches_checks_no_contents(
    run: Any, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "cache_declarations", lambda: None)
    code, text = run()
    assert 0 == code
    assert "missing contents level content checks nothing: this release does not declare" in " ".join(
        text.split()
    )


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_the_kinds_of_caches_are_read_from_the_source_files() -> None:
    found = source_files.cache_declarations()
    assert found is not None
    assert {"FullAttentionSpec", "MambaSpec"} <= set(found.specs)
    assert "KVCacheSpec" not in found.specs


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_the_doctor_does_not_import_torch(tmp_path: Path) -> None:
    """An import of the engine takes many seconds."""
    code = (
        "import sys; from kvledger.audit.entry.doctor import diagnose; found = diagnose();"
        "print(found.examined, found.adapter, 'torch' in sys.modules, 'vllm' in sys.modules, found.problems)"
    )
    environ = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=environ | {"KVLEDGER_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )

    adapter = engines.choose(engines.bare_scheduler()).NAME
    assert f"source {adapter} False False []" == ran.stdout.strip()


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_source_files_and_import_tell_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVLEDGER_DIR", str(tmp_path))
    source, imported = doctor.diagnose(), doctor.diagnose(with_import=True)

    assert ["source", "import"] == [source.examined, imported.examined]
    assert msgspec.structs.replace(source, examined="import") == imported


@pytest.mark.releases
@pytest.mark.parametrize(
    ("folder", "adapter", "reachable"),
    [
        ("0.17.0", "v1-0.17", True),
        ("0.18.1", "v1-0.18", True),
        ("0.19.1", "v1-0.18", True),
        ("0.20.0", "v1-0.20", True),
        ("0.24.0", "v1-0.20", True),
        ("0.27.1", "v1-0.27", True),
        ("0.33.0", "v1-0.27", True),
    ],
)
def test_the_adapter_of_a_release_is_found_in_its_source_files(
    folder: str, adapter: str, reachable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Path(__file__).parents[2] / ".releases" / folder / "vllm"
    if not package.is_dir():
        pytest.skip(f"not here: python3 scripts/releases.py build {folder}")
    spec = SimpleNamespace(origin=str(package / "__init__.py"))
    monkeypatch.setattr(source_files, "find_spec", lambda name: spec)
    source = source_files.read()

    assert source is not None
    assert source.version.startswith(folder)
    assert adapter == engines.choose(source.scheduler, source.output_fields).NAME
    assert reachable == source.has_scheduler_seam


def test_a_vllm_with_an_unknown_layout_is_left_to_the_import(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "_version.py").write_text("__version__ = version = '0.99.0'\n")
    spec = SimpleNamespace(origin=str(tmp_path / "vllm" / "__init__.py"))
    monkeypatch.setattr(source_files, "find_spec", lambda name: spec)

    assert source_files.read() is None


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_the_installed_vllm_has_no_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVLEDGER_DIR", str(tmp_path))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    data = doctor.diagnose()

    assert [] == data.problems
    assert engines.host_version() == data.versions["vllm"]
    assert "connector.get_num_new_matched_tokens" in data.hooks
