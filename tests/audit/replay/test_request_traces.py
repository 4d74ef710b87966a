"""Each format of a request trace, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvledger.audit.errors import LedgerError
from kvledger.audit.replay.request_traces import TracedRequest, block_turns, request_trace, traced_requests


def written(folder: Path, *lines: Any, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return path


def dynamo(received: int, hashes: list[int], session: str = "a") -> dict[str, Any]:
    replay = {"trace_block_size": 64, "input_length": 64 * len(hashes) - 5, "input_sequence_hashes": hashes}
    return {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "agent_context": {"session_id": session},
        "request": {"request_received_ms": received, "output_tokens": 40, "replay": replay},
    }


def test_dynamo_traces_are_in_the_order_of_arrival_and_tools_are_passed_over(tmp_path: Path) -> None:
    tool = {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "tool": {}}
    path = written(tmp_path, dynamo(900, [1 << 63, 8]), tool, dynamo(100, [1 << 63], "b"))

    assert [
        TracedRequest([1], 59, 40, 64, 100_000, "b"),
        TracedRequest([1, 2], 123, 40, 64, 900_000, "a"),
    ] == traced_requests(path)


def test_turns_of_mooncake_sessions_come_after_their_delay(tmp_path: Path) -> None:
    lines = [
        {"session_id": "s0", "input_length": 600, "hash_ids": [0, 1], "timestamp": 0},
        {"session_id": "s0", "input_length": 1200, "hash_ids": [0, 1, 2], "delay_ms": 50},
        {"session_id": "s1", "input_length": 600, "hash_ids": [0, 7], "timestamp": 10},
        {"session_id": "s0", "input_length": 1700, "hash_ids": [0, 1, 2, 3], "delay": 25},
    ]
    path = written(tmp_path, *lines)

    times = [(each.session, each.at) for each in traced_requests(path)]
    assert [("s0", 0), ("s1", 10_000), ("s0", 50_000), ("s0", 75_000)] == times
    turns, _ = block_turns(request_trace(path))
    assert ["s0", "s1", "s0", "s0"] == [turn.session for turn in turns]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens", "has lengths of prompts only"),
        ("Timestamp,Session ID,Elapsed time,Model,Request tokens", "has lengths of prompts only"),
        ('{"timestamp": 1, "input_tokens": 5}', "has lengths of prompts only"),
        ("LMCache INFO: Reqid: a, Total tokens 713", "is no request trace: Dynamo's request trace"),
        ('{"hash_ids": [1], "input_length": 0}', "line 1 is no request of a trace"),
        ('{"hash_ids": [1], "input_length": 5, "timestamp": 1e308}', "line 1 is no request of a trace"),
        ('{"event_type": "request_end", "replay": 1}', "line 1 is no request of a trace"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(LedgerError, match=says):
        traced_requests(written(tmp_path, line))
