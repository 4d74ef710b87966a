"""An ASGI middleware that logs keyed hashes of messages, by which ``kvledger turns`` names what changed.

    KVLEDGER_MESSAGES_LOG=messages.jsonl KVLEDGER_MESSAGES_KEY=... \\
      vllm serve MODEL --middleware kvledger.exporters.message_log.MessageLog

Off unless it is asked for. One JSON line a request of ``/v1/chat/completions``, ``/v1/completions`` or
``/v1/responses``: for each tool and each text of a message its path (``messages[3].content``), its role, its
length in bytes and a keyed hash of eight bytes; the same of the answer; and once for each text that is new to
this process a keyed hash of three bytes for each piece of sixteen bytes. No text leaves the process. Without
the key nobody can test a guess; who has it can, so it is a secret. Servers that share a key can be compared;
without one each process draws its own. A log that can't be written is reported once, and the server goes on.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from typing import Any

from ..audit.bounded_tables import keep_newest
from .asgi import App, Body, Exchange, LineLog, Message, header

VARIABLE = "KVLEDGER_MESSAGES_LOG"
KEY = "KVLEDGER_MESSAGES_KEY"

PIECE = 16
"""Bytes of a piece."""
PIECE_BYTES = 3
"""Bytes of the hash of a piece."""
HASH_BYTES = 8

MOST_KNOWN = 100_000
"""Texts whose pieces were written; the oldest are forgotten, and written again when they come again."""

Part = tuple[str, str, str, int]
"""A text of a request: its path, the role of its message, its hash in hexadecimal, and its bytes."""


class MessageLog(LineLog):
    """Logs hashes of the messages of each request to the file that ``KVLEDGER_MESSAGES_LOG`` names."""

    variable, what = VARIABLE, "messages"

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self._hashes = Hashes(os.environ.get(KEY, ""))
        """Hashes texts."""

    def exchange(self, scope: Message) -> Exchange | None:
        """See the base."""
        return _Chat(scope, self._hashes) if scope.get("method") == "POST" else None


class Hashes:
    """Hashes texts with a key. An empty ``key``: one of this process."""

    def __init__(self, key: str) -> None:
        secret = hashlib.blake2b(key.encode(), digest_size=32).digest() if key else secrets.token_bytes(32)
        self._whole = hashlib.blake2b(key=secret, digest_size=HASH_BYTES, person=b"kvledger text")
        """A hash that has taken in the key; its copies hash texts."""
        self._piece = hashlib.blake2b(key=secret, digest_size=PIECE_BYTES, person=b"kvledger piece")
        """The same, for pieces."""
        self._known: dict[str, None] = {}
        """The texts whose pieces were written, oldest first."""

    def of(self, text: bytes, pieces: dict[str, str]) -> str:
        """The hash of a text. Adds the hashes of its pieces to ``pieces``, if the text is new."""
        whole = self._whole.copy()
        whole.update(text)
        found = whole.hexdigest()
        if found not in self._known:
            self._known[found] = None
            keep_newest(self._known, MOST_KNOWN)
            hashes = b"".join(self._of_piece(text[at : at + PIECE]) for at in range(0, len(text), PIECE))
            pieces[found] = base64.b64encode(hashes).decode()
        return found

    def _of_piece(self, piece: bytes) -> bytes:
        hashed = self._piece.copy()
        hashed.update(piece)
        return hashed.digest()


def texts_of(body: dict[str, Any]) -> Iterator[tuple[str, str, bytes]]:
    """Path, role and UTF-8 text of each tool and message of a request, in the order of the prompt."""
    for index, tool in enumerate(_list(body.get("tools"))):
        yield f"tools[{index}]", "", _text(tool)
    if body.get("instructions"):
        yield "instructions", "system", _text(body["instructions"])
    for name in ("messages", "input", "prompt"):
        value = body.get(name)
        if isinstance(value, str):
            yield name, "", _text(value)
        for index, message in enumerate(_list(value)):
            path = f"{name}[{index}]"
            if not isinstance(message, dict):
                if isinstance(message, str):
                    yield path, "", _text(message)
                continue
            role = str(message.get("role") or message.get("type") or "")
            for field, part in message.items():
                if field in ("role", "type", "id", "status") or part is None:
                    continue
                if isinstance(part, list):
                    for place, one in enumerate(part):
                        yield f"{path}.{field}[{place}]", role, _text(one)
                else:
                    yield f"{path}.{field}", role, _text(part)


def _text(value: Any) -> bytes:
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        value = value["text"]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text.encode(errors="surrogatepass")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text) if text else None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class _Chat(Exchange):
    """The messages of a request; the id of its response, and the text and reasoning of its first choice."""

    def __init__(self, scope: Message, hashes: Hashes) -> None:
        super().__init__(scope)
        self._request = self.asked = Body()
        """The body of the request."""
        self._hashes = hashes
        """Hashes texts."""
        self._id = ""
        """The id."""
        self._content = bytearray()
        """The text, in UTF-8."""
        self._reasoning = bytearray()
        """The reasoning."""

    def read(self, text: bytes) -> None:
        """Read a body, or the data of one event of a stream."""
        body = _object(text)
        body = body["response"] if isinstance(body.get("response"), dict) else body
        self._id = self._id or str(body.get("id") or "")
        for choice in _list(body.get("choices"))[:1]:
            if not isinstance(choice, dict) or choice.get("index"):
                continue
            said = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
            self._content += _text(said.get("content") or "")
            self._reasoning += _text(said.get("reasoning") or said.get("reasoning_content") or "")

    def line(self) -> dict[str, Any] | None:
        """The hashes; None: no messages were asked, or nothing was answered."""
        body = _object(self._request.kept)
        texts = list(texts_of(body))
        if not texts or not self._id:
            return None
        pieces: dict[str, str] = {}
        answer = {"content": bytes(self._content), "reasoning": bytes(self._reasoning)}
        return {
            "id": self._id,
            "x_request_id": header(self.scope, b"x-request-id"),
            "session": str(body.get("session_id") or header(self.scope, b"x-session-id")),
            "parts": [(path, role, self._hashes.of(text, pieces), len(text)) for path, role, text in texts],
            "answer": [(name, "", self._hashes.of(text, pieces), len(text)) for name, text in answer.items()],
            "pieces": pieces,
        }
