"""`kvledger check`: a vLLM server from outside. The recorded text is of vLLM 0.32.0 with ExampleConnector."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.command_line import Outcome, runner
from tests.time_limits import HANGS

from kvledger.audit.analysis.usage import Contradiction, contradictions
from kvledger.audit.release_semantics import meanings

RECORDED = (Path(__file__).parent / "served/metrics-0.32.0.txt").read_text()
MODELS = {"data": [{"id": "tiny", "parent": None}]}


def changed(name: str, value: float, text: str = RECORDED) -> str:
    """The text with this value in the samples whose lines begin with ``name``."""
    lines = text.splitlines()
    assert any(line.startswith(name) for line in lines), name
    return (
        "\n".join(f"{line.rpartition(' ')[0]} {value}" if line.startswith(name) else line for line in lines)
        + "\n"
    )


@contextmanager
def serving(
    *metrics: str, version: str = "0.32.0", models: Any = MODELS, seconds: float = 0, info: Any = None
) -> Iterator[str]:
    """A server that answers /metrics with each of these texts in turn; its address."""
    texts = list(metrics)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(seconds)
            pages: dict[str, Callable[[], str]] = {
                "/metrics": lambda: texts.pop(0) if len(texts) > 1 else texts[0],
                "/version": lambda: json.dumps({"version": version}),
                "/v1/models": lambda: json.dumps(models),
                "/server_info": lambda: json.dumps(info),
            }
            if self.path not in pages:
                self.send_error(404)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(pages[self.path]().encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Runs the command without its pause."""
    monkeypatch.setattr("kvledger.exporters.served_engine.PAUSE_SECONDS", 0.0)
    return runner(capsys, "check")


def data(outcome: Outcome) -> Any:
    return json.loads(outcome.out)


def test_a_healthy_server_is_clean(check: Callable[..., Outcome]) -> None:
    with serving(RECORDED) as url:
        found = data(check(url, "--format", "json"))
        text = check(f"{url}/metrics")
    assert ("clean", "0.32.0", ["tiny"]) == (found["verdict"], found["release"], found["models"])
    assert {"block_size": 32, "blocks": 11, "prefix_caching": True, "drafts": 0, "loras": 0} == {
        name: found["settings"][name]
        for name in ("block_size", "blocks", "prefix_caching", "drafts", "loras")
    }
    assert "connector" in found["settings"]
    assert 0 == text.code
    assert "0 tiny 0.0 % 1,662 5.8 % 1,662 1,662" in " ".join(text.out.split())


def test_faults_that_the_configuration_rules_out_are_left_out(check: Callable[..., Outcome]) -> None:
    def ids(text: str, version: str) -> set[str]:
        with serving(text, version=version) as url:
            return {row["id"] for row in data(check(url, "--format", "json"))["faults"]["faults"]}

    adapters = RECORDED + '# TYPE vllm:lora_requests_info gauge\nvllm:lora_requests_info{max_lora="2"} 1.0\n'
    assert "adapter-named-like-a-salt" not in ids(RECORDED, "0.28.0")
    assert "adapter-named-like-a-salt" in ids(adapters, "0.28.0")


def test_a_fault_whose_conditions_are_known_to_hold_applies(check: Callable[..., Outcome]) -> None:
    adapters = RECORDED + '# TYPE vllm:lora_requests_info gauge\nvllm:lora_requests_info{max_lora="2"} 1.0\n'
    with serving(adapters, version="0.28.0") as url:
        rows = data(check(url, "--format", "json"))["faults"]["faults"]
        text = check(url).out
    here = {
        row["id"] for row in rows if row["state"] == "has" and not row["condition"] and row["kind"] == "fault"
    }
    assert "adapter-named-like-a-salt" in here
    assert f"vLLM 0.28.0 has {len(here)} known fault" in text


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("vllm:prefix_cache_hits_total", 1663, "vllm:prefix_cache_hits_total is 1,663, and "),
        ("vllm:external_prefix_cache_hits_total", 1663, "vllm:external_prefix_cache_hits_total is 1,663"),
        ("vllm:prompt_tokens_total", 1661, " + "),
        ("vllm:prompt_tokens_total", 1663, "vllm:prompt_tokens_total is 1,663, and "),
        ("vllm:prompt_tokens_cached_total", 97, "vllm:prompt_tokens_cached_total is 97, and "),
        ("vllm:generation_tokens_total", 1, "vllm:request_generation_tokens_sum is "),
    ],
)
def test_counters_that_contradict_each_other_are_violated(
    check: Callable[..., Outcome], name: str, value: float, says: str
) -> None:
    with serving(changed(name, value)) as url:
        found = check(url)
    assert 1 == found.code
    assert found.out.startswith("violated: 1 contradiction between the engine's own counters.")
    assert says in " ".join(found.out.split())


def test_cached_tokens_without_a_counted_hit_are_a_contradiction(check: Callable[..., Outcome]) -> None:
    text = changed('vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_cache', 96)
    text = changed(
        'vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external', 0, text
    )
    preempted = changed("vllm:num_preemptions_total", 1, text)
    with serving(text) as url, serving(preempted) as other:
        found, beside = check(url), check(other)
    assert 'source="local_cache_hit"} is 96, and vllm:prefix_cache_hits_total' in " ".join(found.out.split())
    assert (1, 0) == (found.code, beside.code)


def test_the_reason_why_few_tokens_hit_is_in_the_first_line(check: Callable[..., Outcome]) -> None:
    off = RECORDED.replace('enable_prefix_caching="True"', 'enable_prefix_caching="False"')
    with serving(off) as url:
        first = check(url).out.splitlines()[0]
    assert first.endswith("0.0 % of the prompt tokens hit. Prefix caching is off.")


def test_a_probe_that_is_refused_is_said(check: Callable[..., Outcome]) -> None:
    with serving(RECORDED) as url:
        found = check(url, "--probe")
    assert 3 == found.code
    assert "/v1/completions answers with status 501" in found.out


def test_a_counter_that_falls_is_violated(check: Callable[..., Outcome]) -> None:
    with serving(RECORDED, changed("vllm:num_preemptions_total", -1)) as url:
        found = check(url)
    assert 1 == found.code
    assert "vllm:num_preemptions_total fell from 0 to -1." in found.out


def test_another_server_behind_the_address_is_unknown_and_no_contradiction(
    check: Callable[..., Outcome],
) -> None:
    other = changed("process_start_time_seconds", 1.9e9, changed("vllm:prompt_tokens_total", 5))
    with serving(RECORDED, other) as url:
        found = check(url)
    assert 3 == found.code
    assert "Two servers answer at this address" in found.out


def test_counters_that_grow_between_the_scrapes_do_not_contradict() -> None:
    """Hits were read after queries, while both grew."""
    words = {figure: row.word for figure, row in meanings("0.32.0").items()}
    torn = {"local_queried_tokens": 100.0, "local_hit_tokens": 110.0}
    assert [] == list(contradictions(torn, {**torn, "local_queried_tokens": 120.0}, words, "vllm"))
    assert [Contradiction(("local_hit_tokens",), 110, ("local_queried_tokens",), 100)] == list(
        contradictions(torn, torn, words, "vllm")
    )


def test_sums_are_not_checked_where_the_release_defines_none(check: Callable[..., Outcome]) -> None:
    with serving(changed("vllm:prompt_tokens_total", 1661), version="0.19.1") as url:
        assert 0 == check(url).code


def test_an_unknown_release_is_unknown(check: Callable[..., Outcome]) -> None:
    for version in ("", "none", "0.99.0"):
        with serving(RECORDED, version=version) as url:
            assert 3 == check(url).code


def test_a_server_that_counts_nothing_yet_is_unknown(check: Callable[..., Outcome]) -> None:
    with serving('# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size="16"} 1.0\n') as url:
        found = check(url)
    assert 3 == found.code
    assert "No engine has counters there yet." in found.out


def test_names_from_outside_are_printed_escaped(check: Callable[..., Outcome]) -> None:
    text = RECORDED.replace('model_name="tiny"', 'model_name="[red]\x1b[31m"')
    with serving(text, models={"data": [{"id": "[red]\x1b]0;x"}]}) as url:
        printed = check(url).out
    assert "\x1b" not in printed
    assert "[red]" in printed


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host/metrics", "http://", ""])
def test_what_is_no_address_is_refused(check: Callable[..., Outcome], url: str) -> None:
    found = check(url)
    assert 2 == found.code
    assert found.sentence.endswith("is no URL of a server; an example is http://localhost:8000.")


def test_what_is_no_vllm_server_is_refused(check: Callable[..., Outcome]) -> None:
    with serving("up 1.0\n") as url:
        found = check(url)
        assert (2, True) == (found.code, "has no metric of vLLM" in found.err)
        found = check(f"{url}/elsewhere")
        assert (2, True) == (found.code, "answers with status 404" in found.err)
    found = check(url)
    assert (2, f"{url} can't be read: Connection refused.\n") == (found.code, found.err)
    with serving("vllm:prompt_tokens_total{ 1 2 3\n") as url:
        assert "is no text of metrics" in check(url).err


def test_a_server_that_does_not_answer_is_refused_in_time(
    check: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    with serving(RECORDED, seconds=HANGS) as url:
        found = check(url)
    assert 3.9 < time.monotonic() - began < HANGS
    assert (2, f"{url} does not answer in 4 seconds.\n") == (found.code, found.err)


# --- SGLang ---------------------------------------------------------------------------------------------

SGLANG = (Path(__file__).parent / "served/metrics-sglang-0.5.23.txt").read_text()
"""What the collector of SGLang 0.5.23 tells of three requests."""


def test_a_server_of_sglang_is_checked(check: Callable[..., Outcome]) -> None:
    with serving(SGLANG, info={"version": "0.5.23", "page_size": 16, "disable_radix_cache": False}) as url:
        found, text = data(check(url, "--format", "json")), check(url)
    assert ("sglang", "0.5.23", "clean") == (found["product"], found["release"], found["verdict"])
    assert {"block_size": 16, "prefix_caching": True} == found["settings"]
    assert text.out.startswith("clean: the counters agree with each other. 35.8 % of the prompt tokens hit.")
    assert "SGLang 0.5.23" in text.out


@pytest.mark.parametrize(("cached", "code"), [(704, 1), (768, 0), (832, 1)])
def test_cached_and_computed_tokens_of_sglang_sum_to_the_prompt(
    check: Callable[..., Outcome], cached: int, code: int
) -> None:
    with serving(
        changed('sglang:cached_tokens_total{cache_source="device"', cached, SGLANG),
        info={"version": "0.5.23"},
    ) as url:
        found = check(url)
    assert code == found.code
    assert not code or "sglang:cached_tokens_total" in found.out


def test_sglang_without_its_tree_has_no_hits_for_one_reason(check: Callable[..., Outcome]) -> None:
    with serving(SGLANG, info={"version": "0.5.23", "disable_radix_cache": True}) as url:
        assert "Prefix caching is off." in check(url).out


def test_a_probe_of_sglang_is_refused_in_a_sentence(check: Callable[..., Outcome]) -> None:
    with serving(SGLANG, info={"version": "0.5.23"}) as url:
        found = check(url, "--probe")
    assert (3, True) == (found.code, "Only a server of vLLM can be probed." in found.out)
