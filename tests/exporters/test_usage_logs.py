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
                "id": "chatcmpl-a",
                "type": "message",
                "usage": {"input_tokens": 4, "output_tokens": 5, "cache_read_input_tokens": 64}
                | {"cache_creation_input_tokens": 2},
            },
            ("chatcmpl-a",),
        ),
        (
            {
                "id": "obs-1",
                "traceId": TRACE,
                "metadata": {"response_id": "cmpl-a"},
                "usageDetails": {"input": 6, "input_cached_tokens": 64, "output": 5, "total": 75},
            },
            ("cmpl-a", TRACE, "obs-1"),
        ),
        (
            {
                "meta_info": {"id": "a", "prompt_tokens": 70, "cached_tokens": 64, "completion_tokens": 5},
                "text": "",
            },
            ("a",),
        ),
        (
            {
                "attributes": {
                    "gen_ai.request.id": "cmpl-a",
                    "gen_ai.usage.prompt_tokens": 70,
                    "gen_ai.usage.completion_tokens": 5,
                    "gen_ai.usage.cache_read_input_tokens": 64,
                }
            },
            ("cmpl-a",),
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
    ids=[
        *("completion", "wrapped", "responses", "messages", "langfuse", "sglang", "vllm-span"),
        *("litellm", "span", "envoy", "envoy-metadata", "otlp"),
    ],
)
def test_a_line_tells_of_a_call(tmp_path: Path, record: Any, names: tuple[str, ...]) -> None:
    assert [Told(names, 70, 64, 5, 1)] == [
        each._replace(written=None) for each in read(lines(tmp_path, record)).told
    ]


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 70, "prompt_tokens_details": {"cached_tokens": 64, "created_cache_tokens": 2}},
        {"input_tokens": 70, "input_tokens_details": {"cached_tokens": 64, "cache_write_tokens": 2}},
        {"input_tokens": 4, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 2},
    ],
)
def test_what_was_written_to_the_cache_is_read(tmp_path: Path, usage: Any) -> None:
    assert [Told(("a",), 70, 64, None, 1, 2)] == list(read(lines(tmp_path, {"id": "a", "usage": usage})).told)


def test_calls_that_a_gateway_priced_at_0_are_counted(tmp_path: Path) -> None:
    call = {"id": "a", "call_type": "acompletion", "prompt_tokens": 7, "response_cost": 0.0}

    assert 1 == read(lines(tmp_path, call, call | {"response_cost": 0.1})).free


def test_who_pays_is_the_team_that_litellm_authenticated_or_a_field_that_is_named(tmp_path: Path) -> None:
    """``user`` and ``requester_metadata`` are what the client says of itself."""
    said = {
        "user_api_key_team_id": "team-1",
        "user_api_key_hash": "h",
        "requester_metadata": {"team": "team-2"},
    }
    call = {"id": "a", "call_type": "acompletion", "prompt_tokens": 7, "metadata": said, "user": "team-2"}
    log = lines(tmp_path, call, {"id": "cmpl-a", "usage": USAGE, "user": "team-2"})

    assert ["team-1", ""] == [each.tenant for each in read(log).told]
    assert ["h", ""] == [each.tenant for each in read(log, "metadata/user_api_key_hash").told]


def test_a_server_without_prompt_details_tells_no_cached_figure(tmp_path: Path) -> None:
    bare = {
        "id": "cmpl-a",
        "usage": {"prompt_tokens": 70, "completion_tokens": 5, "prompt_tokens_details": None},
    }

    assert [Told(("cmpl-a",), 70, None, 5, 1)] == list(read(lines(tmp_path, bare)).told)


def test_lines_without_usage_or_id_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    log = read(lines(tmp_path, {"msg": "started"}, "\n", {"usage": USAGE}, {"id": "cmpl-a", "usage": None}))

    assert (0, 3, "line 1 has no usage, or no id") == (len(log.told), *log[1:3])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{broken\n", "line 2 is no JSON"),
        ("[1, 2]\n", "line 2 is not as it should be: Expected `object`, got `array`"),
        ('{"a": ' + "[" * 100_000 + "\n", "line 2 is nested too deeply"),
        (
            '{"a": ' + "9" * 5_000 + "}\n",
            "line 2 is not as it should be: Integer value out of range - at `$[...]`",
        ),
        ("\xff\xfe\n", "line 2 is no JSON"),
        ('{"id": "a", "usage": {"prompt_tokens": "many"}}\n', "line 2 has a token count that is no number"),
        ('{"id": "a", "usage": {"prompt_tokens": 1.5}}\n', "line 2 has a token count that is no number"),
        ('{"id": "a", "usage": {"prompt_tokens": -1}}\n', "line 2 has a token count that is no number"),
        (
            '{"id": "a", "usage": {"prompt_tokens": 1e999}}\n',
            "line 2 is not as it should be: Number out of range - at `$[...][...]`",
        ),
        ('{"resourceSpans": [1]}\n', "line 2 is no OTLP: a list of objects is something else"),
        ('{"id": "a", "usage": {"prompt_tokens_details": 3}}\n', "line 2 has no usage, or no id"),
    ],
)
def test_a_bad_line_is_said_and_the_others_are_read(tmp_path: Path, line: str, says: str) -> None:
    call = {"id": "cmpl-a", "usage": USAGE}
    log = read(lines(tmp_path, call, line, call))

    assert (2, 1, says) == (len(log.told), *log[1:3])


def test_a_log_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"nothing.jsonl can't be read: No such file"):
        read(tmp_path / "nothing.jsonl")
