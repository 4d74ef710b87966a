"""What the run with real routers reads and writes: the router's log, the tokens of a text, and the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from proofs import routed

LINE = (
    "\x1b[2m2026-11-24 00:34:14\x1b[0m DEBUG vllm_router_rs::policies::kv_aware: KV prefix decision "
    'outcome="prefix_cost" \x1b[3mworker\x1b[0m="http://127.0.0.1:{port}" input_tokens=105 '
    "new_prefill_tokens=41 credited_prefix_tokens={tokens} used_binding=false\n"
)


def test_the_decisions_of_a_request_are_those_that_were_logged_during_it(tmp_path: Path) -> None:
    router = routed.Router(tmp_path, Path("vllm-router"), [])
    (tmp_path / "router.log").write_text(LINE.format(port=1, tokens=32))
    before = router.log_size()
    with (tmp_path / "router.log").open("a") as log:
        log.write("KV request selected attempt=0\n" + LINE.format(port=2, tokens=64))
        log.write(LINE.format(port=3, tokens=0))

    assert [("http://127.0.0.1:2", 64), ("http://127.0.0.1:3", 0)] == router.decisions(before)


def test_a_text_has_as_many_tokens_as_words(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    routed.write_tokenizer(tmp_path)
    read = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))

    for prompt in routed.prompts(20, 1):
        assert [int(word[1:]) for word in prompt.split()] == read.encode(prompt).ids


def test_the_page_keeps_what_is_around_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "routing.md"
    page.write_text(f"# Before\n\n{routed.BEGIN}\nold\n{routed.END}\n\nAfter\n")
    monkeypatch.setattr(routed, "PAGE", page)
    table = "3 requests on 2 engines.\n\nrequests  tokens  cause\n\nrequest  engine\nr-1  1\n"
    shown = dict.fromkeys(("whole", "lossy", "tokens", "vllm-router", "dynamo"), table)
    routed.write({"first": [200, 200, 503], "retried": 1, "sidecar": {}}, shown)

    text = page.read_text()
    assert text.startswith("# Before") and text.endswith(f"{routed.END}\n\nAfter\n")
    assert "2 of 3 requests were answered" in text and "old" not in text
    assert 5 == text.count("    3 requests on 2 engines.") and "r-1" not in text


def test_the_sidecars_counts_are_summed_over_engines() -> None:
    text = "".join(
        f"# TYPE {name}_total counter\n"
        + "".join(f"{name}_total{{{labels}}} {value}\n" for labels, value in rows)
        for name, rows in {
            "kvledger_routed_requests": [('engine="a"', 3), ('engine="b"', 4)],
            "kvledger_routing_missed_tokens": [('engine="a",cause="x"', 32), ('engine="b",cause="y"', 0)],
            "kvledger_prompt_tokens": [('engine="a"', 9)],
        }.items()
    )

    assert {"kvledger_routed_requests": 7, "kvledger_routing_missed_tokens x": 32} == routed.counted(text)
    assert json.dumps(routed.counted(""))
