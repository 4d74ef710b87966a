"""The demo's workload on the real engine: what it causes on every run, and what injections change."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.time_limits import RUN_HANGS

from kvledger.audit.demo import workload
from kvledger.audit.demo.model import write_model
from kvledger.audit.demo.workload import INJECTIONS

pytest.importorskip("vllm")

pytestmark = pytest.mark.whole_engine

SOURCES = [
    f'vllm:prompt_tokens_by_source{{source="{source}"}}'
    for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
]
FORKED = Path(__file__).with_name("forked.py")
FATAL = "double-free"
"""With this defect the engine fails when it allocates the block again, observed or not."""
REQUESTS = [request for wave in workload.DEFAULT_WAVES for request in wave.requests]


def python(*arguments: str | Path, code: int = 0) -> str:
    """The standard output of a Python program without a journal, or its standard error if it should fail."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("KVLEDGER", "VLLM"))}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2] / "src")
    command = [sys.executable, *map(str, arguments)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_HANGS)
    assert process.returncode == code, process.stderr
    return process.stderr if code else process.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of all in-process runs: two seeds, and every injection that the engine survives."""
    output_folder = tmp_path_factory.mktemp("demo")
    python(FORKED, output_folder, "seed-0", "seed-1", *(name for name in INJECTIONS if name != FATAL))
    return output_folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    return result(folder, "seed-0")


@pytest.fixture(scope="module")
def own_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run with EngineCore in its own process; `printed` is its standard output."""
    output = tmp_path_factory.mktemp("own") / "result.json"
    printed = python("-m", "kvledger.audit.demo.engine", "--output", output)
    return json.loads(output.read_text()) | {"printed": printed}


def result(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


def seen(folder: Path, name: str) -> dict[str, Any]:
    return result(folder, f"{name}.seen")


def digests(run: dict[str, Any]) -> dict[str, str]:
    return {request["id"]: request["digest"] for request in run["requests"]}


def test_every_request_gets_all_of_its_output_tokens(plain):
    requests = {request.id: request for request in REQUESTS if not request.aborted_after}

    assert len(plain["requests"]) >= 24
    assert {name: (request.prompt_tokens, request.output_tokens) for name, request in requests.items()} == {
        request["id"]: (request["prompt_tokens"], request["output_tokens"]) for request in plain["requests"]
    }


def test_requests_are_preempted_in_prefill_and_in_decode(folder, plain):
    assert Counter(prefill=7, decode=3) == Counter(seen(folder, "seed-0")["preempted"])
    assert plain["counters"]["vllm:num_preemptions"] == 9, "one was of a request without any output"


def test_a_resumed_request_hits_more_external_tokens_than_at_its_first_admission(folder):
    """Preempted after its first 32 tokens; the connector then has 64, which another request saved."""
    assert seen(folder, "seed-0")["admitted"]["race-overtaken"] == [[0, 0], [0, 64]]


def test_a_request_is_aborted_before_its_first_output(folder, plain):
    """The engine counts its prefix-cache lookup and never its prompt."""
    (aborted,) = (request for request in REQUESTS if request.aborted_after)
    counters = plain["counters"]

    assert aborted.id not in digests(plain)
    assert seen(folder, "seed-0")["admitted"][aborted.id] == [[0, 0]], "it never resumed"
    assert counters["vllm:prefix_cache_queries"] - counters["vllm:prompt_tokens"] == aborted.prompt_tokens


def test_requests_resume_from_the_local_cache_and_externally(folder):
    admitted = seen(folder, "seed-0")["admitted"].values()
    resumed = [hits for first, *later in admitted for hits in later]

    assert any(local > 0 and external == 0 for local, external in resumed)
    assert any(external > 0 for _, external in resumed)


def test_prompts_are_hit_locally_and_externally_and_every_token_is_counted_once(plain):
    counters = plain["counters"]

    assert all(counters[source] > 0 for source in SOURCES)
    assert counters["vllm:prompt_tokens"] == sum(counters[source] for source in SOURCES)


def test_tokens_loaded_by_the_connector_give_the_same_outputs(plain):
    """The "again" wave repeats the "cold" wave after the local cache was reset."""
    answers = digests(plain)
    reloaded = {name: answers[name] for name in answers if name.startswith("again-")}

    assert reloaded == {name: answers[name.replace("again", "cold")] for name in reloaded}


def test_the_default_workload_triggers_no_released_defect(folder, plain):
    assert seen(folder, "seed-0")["negative_matches"] == []
    assert plain["refused_by_the_engines_counters"] == []


def test_a_matchable_request_stays_within_its_saved_blocks():
    """Otherwise the connector opens a file that it never wrote, and the engine fails."""
    block = workload.BLOCK_TOKENS
    for request in REQUESTS:
        unmatched = request.prompt_tokens % block == 1
        last_whole_tokens = (request.prompt_tokens - 1) // block * block
        assert unmatched or request.prompt_tokens + request.output_tokens <= last_whole_tokens + block


# --- repeatable runs --------------------------------------------------------------------------------


def test_an_engine_core_process_gives_the_same_outputs_and_counters(plain, own_process):
    assert digests(plain) == digests(own_process)
    assert plain["counters"] == own_process["counters"]


def test_a_seed_changes_tokens_and_no_counter(folder, plain):
    other = result(folder, "seed-1")

    assert plain["counters"] == other["counters"]
    assert digests(plain) != digests(other)


def test_standard_output_has_progress_lines_only(own_process):
    lines = [json.loads(line) for line in own_process["printed"].splitlines()]

    assert lines == [{"done": done, "of": 29} for done in range(1, 30)]


def test_the_same_seed_gives_the_same_weights(tmp_path):
    one, two, other = (
        (write_model(tmp_path / name, seed) / "model.safetensors").read_bytes()
        for name, seed in (("one", 7), ("two", 7), ("other", 8))
    )

    assert one == two != other


# --- injections -------------------------------------------------------------------------------------


def test_inject_list_prints_every_injection():
    listed = python("-m", "kvledger.audit.demo.engine", "--inject", "list")

    assert list(INJECTIONS) == [line.split()[0] for line in listed.splitlines()]


def test_a_refused_negative_local_hit_loses_other_counts_of_its_iteration(folder, plain):
    run = result(folder, "negative-local-hit")

    assert ["Counters can only be incremented by non-negative amounts."] * 3 == run[
        "refused_by_the_engines_counters"
    ]
    assert run["counters"]["vllm:generation_tokens"] < plain["counters"]["vllm:generation_tokens"]
    assert digests(run) == digests(plain)


def test_a_clamped_local_hit_counts_more_tokens_than_the_prompts_have(folder):
    counters = result(folder, "clamped-local-hit")["counters"]

    assert sum(counters[source] for source in SOURCES) > counters["vllm:prompt_tokens"]


def test_promise_not_loaded_changes_outputs_and_no_counter(folder, plain):
    run = result(folder, "promise-not-loaded")

    assert run["counters"] == plain["counters"]
    assert digests(run) != digests(plain)


def test_lookup_counted_raises_the_counted_queries(folder, plain):
    counters = result(folder, "lookup-counted")["counters"]

    assert counters["vllm:prompt_tokens"] == plain["counters"]["vllm:prompt_tokens"]
    assert counters["vllm:prefix_cache_queries"] > plain["counters"]["vllm:prefix_cache_queries"]


def test_a_stale_lookup_gives_a_wrong_output(folder):
    answers = digests(result(folder, "stale-lookup"))

    assert answers["before-bare"] != answers["after-bare"]


def test_a_block_freed_twice_fails_the_engine(tmp_path):
    assert "assert block.ref_cnt == 0" in python(FORKED, tmp_path, FATAL, code=1)


def test_negative_match_needs_no_patch_and_preempts_seven_times(folder):
    assert seen(folder, "negative-match")["negative_matches"] == [-32] * 7
    assert result(folder, "negative-match")["counters"]["vllm:num_preemptions"] == 7
