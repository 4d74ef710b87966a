"""Each kind of log line, as its writer documents it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvledger.audit.analysis.usage import Told
from kvledger.audit.errors import LedgerError
from kvledger.exporters.usage_logs import read

USAGE = {
    "prompt_tokens": 70,
    "completion_tokens": 5,
    "total_tokens": 75,
    "prompt_tokens_details": {"cached_tokens": 64},
}
ATTRIBUTES = {
    "gen_ai.response.id": "cmpl-a",
    "gen_ai.usage.input_tokens": 70,
    "gen_ai.usage.output_tokens": 5,
    "gen_ai.usage.cache_read.input_tokens": 64,
}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def lines(tmp_path: Path, *records: Any) -> Path:
    path = tmp_path / "usage.jsonl"
    path.write_text("".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in records))
    return path


@pytest.mark.parametrize(
    ("record", "names"),
    [
        ({"id": "cmpl-a", "object": "text_completion", "usage": USAGE}, ("cmpl-a",)),
        ({"x_request_id": "a", "response": {"id": "cmpl-a", "usage": USAGE}}, ("cmpl-a", "a")),
        (
            {
                "id": "resp_a",
                "usage": {
                    "input_tokens": 70,
                    "output_tokens": 5,
                    "input_tokens_details": {"cached_tokens": 64},
                },
            },
            ("resp_a",),
        ),
        (
            {
                "id": "lite-1",
                "call_type": "acompletion",
                "prompt_tokens": 70,
                "completion_tokens": 5,
                "metadata": {"usage_object": USAGE},
                "response": {"id": "cmpl-a"},
            },
            ("cmpl-a", "lite-1"),
        ),
        ({"attributes": ATTRIBUTES, "context": {"trace_id": f"0x{TRACE}"}}, ("cmpl-a", TRACE)),
        (ATTRIBUTES, ("cmpl-a",)),
        (
            {
                "x-request-id": "a",
                "llm_input_token": "70",
                "llm_cached_input_token": "64",
                "llm_output_token": "5",
            },
            ("a",),
        ),
        (
            {
                "resourceSpans": [
                    {
                        "scopeSpans": [
                            {
                                "spans": [
                                    {
                                        "traceId": TRACE,
                                        "attributes": [
                                            {"key": "gen_ai.response.id", "value": {"stringValue": "cmpl-a"}},
                                            {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "70"}},
                                            {"key": "gen_ai.usage.output_tokens", "value": {"intValue": "5"}},
                                            {
                                                "key": "gen_ai.usage.cache_read.input_tokens",
                                                "value": {"intValue": "64"},
                                            },
                                        ],
                                    }
                                ]
                            }
                        ]
                    }
                ]
            },
            ("cmpl-a", TRACE),
        ),
    ],
    ids=["completion", "wrapped", "responses", "litellm", "span", "envoy", "envoy-metadata", "otlp"],
)
def test_a_line_tells_of_a_call(tmp_path: Path, record: Any, names: tuple[str, ...]) -> None:
    assert [Told(names, 70, 64, 5, 1)] == read(lines(tmp_path, record)).told


def test_a_server_without_prompt_details_tells_no_cached_figure(tmp_path: Path) -> None:
    bare = {
        "id": "cmpl-a",
        "usage": {"prompt_tokens": 70, "completion_tokens": 5, "prompt_tokens_details": None},
    }

    assert [Told(("cmpl-a",), 70, None, 5, 1)] == read(lines(tmp_path, bare)).told


def test_lines_without_usage_or_id_are_counted(tmp_path: Path) -> None:
    log = read(lines(tmp_path, {"msg": "started"}, "\n", {"usage": USAGE}, {"id": "cmpl-a", "usage": None}))

    assert ([], 3) == log


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{broken\n", "Line 1 of .* is no JSON object"),
        ("[1, 2]\n", "Line 1 of .* is no JSON object"),
        (
            '{"id": "a", "usage": {"prompt_tokens": "many"}}\n',
            "Line 1 of .* has a token count that is no number",
        ),
        (
            '{"id": "a", "usage": {"prompt_tokens": 1.5}}\n',
            "Line 1 of .* has a token count that is no number",
        ),
        ('{"resourceSpans": [1]}\n', "Line 1 of .* has a token count that is no number"),
        ('{"id": "a", "usage": {"prompt_tokens_details": 3}}\n', "Line 1 of .* has a token count"),
    ],
)
def test_a_bad_line_is_one_sentence(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(LedgerError, match=says):
        read(lines(tmp_path, line))


def test_a_log_that_is_not_there_or_no_text_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"nothing.jsonl can't be read: No such file"):
        read(tmp_path / "nothing.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LedgerError, match="is no text in UTF-8"):
        read(tmp_path / "binary")
