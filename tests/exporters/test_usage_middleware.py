"""The middleware logs usage and ids, changes nothing, and keeps no text."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from kvledger.exporters import usage_middleware
from kvledger.exporters.usage_logs import read
from kvledger.exporters.usage_middleware import UsageLog

BODY = json.dumps(
    {
        "id": "cmpl-a",
        "object": "text_completion",
        "choices": [{"text": "secret"}],
        "usage": {"prompt_tokens": 7},
    }
).encode()
HEADERS = [(b"X-Request-Id", b"a")]


def serve(content_type: str, *parts: bytes, raises: bool = False) -> list[Any]:
    """Serve one request through the middleware; returns the messages that the client got."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"Content-Type", content_type.encode())],
            }
        )
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if raises:
            raise ConnectionError("the client left")

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {}

    asyncio.run(UsageLog(app)({"type": "http", "headers": HEADERS}, receive, send))
    return sent


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "usage.jsonl"
    monkeypatch.setenv(usage_middleware.VARIABLE, str(path))
    return path


def test_a_response_is_logged_without_its_text(log: Path) -> None:
    sent = serve("application/json", BODY[:20], BODY[20:])

    assert [BODY[:20], BODY[20:]] == [each["body"] for each in sent[1:]]
    assert "secret" not in log.read_text()
    (told,) = read(log).told
    assert (("cmpl-a", "a"), 7) == (told.names, told.prompt_tokens)


def test_the_last_usage_of_a_stream_is_logged(log: Path) -> None:
    first, last = (b'data: {"id": "cmpl-a", "usage": {"prompt_tokens": %d}}\n\n' % n for n in (1, 7))

    serve("text/event-stream; charset=utf-8", first + last[:10], last[10:] + b"data: [DONE]\n\n")

    assert [7] == [each.prompt_tokens for each in read(log).told]


def test_an_event_of_the_responses_api_is_logged(log: Path) -> None:
    serve("text/event-stream", b'data: {"response": {"id": "resp_a", "usage": {"input_tokens": 7}}}\n')

    assert [("resp_a", "a")] == [each.names for each in read(log).told]


def test_the_events_of_the_messages_api_are_one_call(log: Path) -> None:
    """vLLM 0.32 tells the whole prompt first, and at the end what was neither read nor written."""
    first = {"type": "message", "id": "chatcmpl-a", "usage": {"input_tokens": 142, "output_tokens": 0}}
    last = {"input_tokens": 14, "output_tokens": 4, "cache_read_input_tokens": 128}
    for event in (
        {"type": "message_start", "message": first},
        {"type": "message_delta", "delta": {}, "usage": last},
    ):
        serve("text/event-stream", b"data: %s\n" % json.dumps(event).encode())
    whole = [json.dumps({"type": "message_start", "message": first}), json.dumps({"usage": last})]
    serve("text/event-stream", b"".join(b"data: %s\n" % each.encode() for each in whole))

    told = read(log).told
    assert [142, 142, 142] == [each.prompt_tokens for each in told]
    assert (("chatcmpl-a", "a"), 128, 4) == (told[-1].names, told[-1].cached, told[-1].output_tokens)


def test_a_response_without_usage_is_not_logged(log: Path) -> None:
    serve("application/json", b'{"data": []}')
    serve("text/event-stream", b"data: [DONE]\n\n")
    serve("text/plain", b'"usage" {broken')

    assert not log.exists()


def test_what_came_before_the_client_left_is_logged(log: Path) -> None:
    with pytest.raises(ConnectionError):
        serve("text/event-stream", b'data: {"id": "cmpl-a", "usage": {"prompt_tokens": 7}}\n', raises=True)

    assert 1 == len(read(log).told)


def test_large_bodies_and_lines_are_passed_over(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_middleware, "LARGEST_BODY", 10)
    monkeypatch.setattr(usage_middleware, "LARGEST_LINE", 100)
    serve("application/json", BODY)
    line = b'data: {"id": "cmpl-a", "usage": {"prompt_tokens": 7}, "text": "%s"}' % (200 * b"x")
    serve("text/event-stream", line, b"\n", b'data: {"id": "cmpl-b", "usage": {"prompt_tokens": 8}}\n')

    assert [8] == [each.prompt_tokens for each in read(log).told]


def test_a_log_that_cannot_be_written_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(usage_middleware.VARIABLE, str(tmp_path / "no" / "folder"))
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "headers": []})
        await send({"type": "http.response.body", "body": BODY})

    async def twice() -> None:
        server = UsageLog(app)
        for _ in range(2):
            await server({"type": "http", "headers": []}, None, _append(sent))  # type: ignore[arg-type]

    # vLLM sets the level of its loggers and keeps their records from the root, where caplog listens.
    monkeypatch.setattr(usage_middleware, "logger", logging.getLogger(__name__))
    asyncio.run(twice())

    assert 4 == len(sent)
    assert 1 == sum("usage figures can't be logged" in each.message for each in caplog.records)


def _append(sent: list[Any]) -> Any:
    async def send(message: Any) -> None:
        sent.append(message)

    return send
