"""The middleware logs keyed hashes of messages, keeps no text, and the log names what changed."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest

from kvledger.audit.errors import LedgerError
from kvledger.exporters import asgi, message_log
from kvledger.exporters.message_log import MessageLog
from kvledger.exporters.messages import Messages

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("search", "read", "write")]
SYSTEM = "You are a careful assistant of the harbour office. Today is 2026-11-25 10:00."
CHAT = {
    "session_id": "chat",
    "tools": TOOLS,
    "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "canary question"}],
}
ANSWER = {"role": "assistant", "content": "canary answer", "reasoning": "canary thoughts"}


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "messages.jsonl"
    monkeypatch.setenv(message_log.VARIABLE, str(path))
    return path


def serve(
    *bodies: Any, stream: bool = False, answer: dict[str, str] = ANSWER, middleware: Any = None
) -> list[Any]:
    """Send chats through the middleware, as requests chatcmpl-1, chatcmpl-2, ...; what the client got."""
    sent: list[Any] = []
    number = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        name, kind = f"chatcmpl-{number}", b"text/event-stream" if stream else b"application/json"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        if not stream:
            whole = json.dumps({"id": name, "choices": [{"index": 0, "message": answer}]}).encode()
            await send({"type": "http.response.body", "body": whole})
            return
        for field, text in answer.items():
            for at in range(0, len(text), 5):
                event = {"id": name, "choices": [{"index": 0, "delta": {field: text[at : at + 5]}}]}
                line = b"data: " + json.dumps(event).encode() + b"\n\n"
                await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def send(message: Any) -> None:
        sent.append(message)

    middleware = middleware or MessageLog(app)
    middleware._app = app
    for body in bodies:
        number += 1
        whole = json.dumps(body).encode()
        parts = [whole[:40], whole[40:]]

        async def receive(parts: list[bytes] = parts) -> Any:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        asyncio.run(middleware({"type": "http", "method": "POST", "headers": []}, receive, send))
    return sent


def grown(body: dict[str, Any], answer: dict[str, str] = ANSWER) -> dict[str, Any]:
    """The next turn of a chat."""
    after = copy.deepcopy(body)
    after["messages"] += [dict(answer), {"role": "user", "content": "next"}]
    return after


def changed(log: Path, before: Any, after: Any, **more: Any) -> str:
    """What the log says of a turn and the next one."""
    log.unlink(missing_ok=True)
    serve(before, after, **more)
    return Messages(log).changed("chatcmpl-1-0123abcd", "chatcmpl-2-0123abcd")


def test_no_text_is_logged_and_the_answer_is_unchanged(log: Path) -> None:
    sent = serve(CHAT)

    text = log.read_text()
    assert not [word for word in ("canary", "careful", "harbour", "search") if word in text]
    assert "canary answer" in sent[1]["body"].decode()
    assert "chat" == Messages(log).session("chatcmpl-1")


def test_a_chat_that_grows_has_nothing_changed(log: Path) -> None:
    assert "" == changed(log, CHAT, grown(CHAT))
    assert "" == changed(log, CHAT, grown(CHAT), stream=True)


def test_a_time_in_the_system_prompt_is_named_with_its_bytes(log: Path) -> None:
    after = grown(CHAT)
    after["messages"][0]["content"] = SYSTEM.replace("10:00", "10:05")

    found = changed(log, CHAT, after)

    assert f"messages[0].content changed within bytes 64 to {len(SYSTEM)} of {len(SYSTEM)}" == found


def test_a_text_of_another_length_is_named_with_its_first_piece(log: Path) -> None:
    after = grown(CHAT)
    after["messages"][0]["content"] = SYSTEM.replace("harbour office", "harbour")

    assert "messages[0].content changed from a byte between 32 and 47 on" == changed(log, CHAT, after)


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ([TOOLS[0], TOOLS[2], TOOLS[1]], "the tools came in another order, from tools[1] on"),
        ([TOOLS[0], {"type": "other"}, TOOLS[2]], "tools[1] changed"),
        (TOOLS[:2], "tools[2] was removed"),
        ([*TOOLS, {"type": "other"}], "tools[3] was added"),
        ([TOOLS[0], {"type": "other"}, *TOOLS[1:]], "tools were added, from tools[1] on"),
    ],
)
def test_tools_are_named(log: Path, tools: Any, says: str) -> None:
    assert says == changed(log, CHAT, grown(CHAT) | {"tools": tools})


def test_a_history_that_was_rewritten_is_named(log: Path) -> None:
    whole = grown(grown(CHAT))
    short = copy.deepcopy(whole)
    short["messages"][1:5] = [{"role": "user", "content": "a summary"}]

    assert "the history was rewritten from messages[1].content on" == changed(log, whole, short)


def test_an_answer_without_its_reasoning_is_named(log: Path) -> None:
    stripped = {"role": "assistant", "content": "canary answer"}

    found = changed(log, CHAT, grown(CHAT, stripped))
    assert "the answer came back without its reasoning of 15 bytes" == found
    assert found == changed(log, CHAT, grown(CHAT, stripped), stream=True)


def test_an_answer_that_came_back_changed_is_named(log: Path) -> None:
    other = ANSWER | {"content": "canary ANSWER"}

    found = changed(log, CHAT, grown(CHAT, other))
    assert "the answer came back changed: messages[2].content within bytes 0 to 13 of 13" == found


def test_servers_with_one_key_make_equal_hashes_and_others_do_not(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parts(key: str) -> Any:
        monkeypatch.setenv(message_log.KEY, key)
        log.unlink(missing_ok=True)
        serve(CHAT)
        return json.loads(log.read_text())["parts"]

    assert parts("one key of us") == parts("one key of us") != parts("another key")
    assert parts("") != parts("")


def test_the_pieces_of_a_text_are_written_once(log: Path) -> None:
    serve(CHAT, grown(CHAT))

    first, second = (json.loads(line)["pieces"] for line in log.read_text().splitlines())
    assert len(first) == 7 and len(second) == 1  # tools, two messages, the answer; then the next question


def test_a_body_that_is_too_large_or_no_chat_is_not_logged(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve({"model": "small"}, [], "text")
    monkeypatch.setattr(asgi, "LARGEST_BODY", 30)
    serve(CHAT)

    assert not log.exists()


def test_a_log_that_can_not_be_written_stops_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(message_log.VARIABLE, str(tmp_path / "no" / "folder"))

    assert 2 == len(serve(CHAT))


@pytest.mark.parametrize("text", ["no JSON\n", '{"id": 3}\n', "\udcff"])
def test_a_log_that_can_not_be_read_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "messages.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))

    with pytest.raises(LedgerError, match=r"Line 1 of .* is no line of a log of messages"):
        Messages(path)
    with pytest.raises(LedgerError, match="can't be read"):
        Messages(tmp_path)
