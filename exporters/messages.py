"""What changed between two requests, by the hashes of their messages that ``message_log.py`` wrote."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import msgspec

from ..audit.client_ids import client_names
from ..audit.errors import LedgerError
from .message_log import PIECE, PIECE_BYTES, Part


class Logged(msgspec.Struct):
    """The texts of one request and of its answer."""

    id: str
    parts: list[Part]
    answer: list[Part] = []
    x_request_id: str = ""
    session: str = ""
    pieces: dict[str, str] = {}


class Messages:
    """A log of messages. Raises LedgerError if it can't be read."""

    def __init__(self, path: Path) -> None:
        self._by_name: dict[str, Logged] = {}
        """Requests by each of their ids."""
        self._pieces: dict[str, bytes] = {}
        """The hashes of the pieces of each text, by its hash."""
        decode, number = msgspec.json.Decoder(Logged).decode, 0
        try:
            with path.open("rb") as lines:
                for line in lines:
                    number += 1
                    if line.strip():
                        self._add(decode(line))
        except OSError as error:
            raise LedgerError(f"{path} can't be read: {error.strerror}.") from error
        except (msgspec.DecodeError, ValueError) as error:
            raise LedgerError(f"Line {number} of {path} is no line of a log of messages: {error}.") from None

    def _add(self, logged: Logged) -> None:
        for name in (logged.id, logged.x_request_id):
            if name:
                self._by_name[name] = logged
        for text, hashes in logged.pieces.items():
            self._pieces[text] = base64.b64decode(hashes, validate=True)
        logged.pieces = {}

    def find(self, request_id: str) -> Logged | None:
        """The messages of a request of an engine, by any id that its client knows."""
        names = sorted(client_names(request_id, None))
        return next((self._by_name[name] for _, name in names if name in self._by_name), None)

    def session(self, request_id: str) -> str:
        """The session that the client named; "": none."""
        logged = self.find(request_id)
        return "" if logged is None else logged.session

    def changed(self, before: str, after: str) -> str:
        """What of a request of the engine differs from the turn before; "": nothing, or it is not known."""
        one, other = self.find(before), self.find(after)
        if one is None or other is None:
            return ""
        return self._tools(one, other) or self._messages(one, other)

    def _tools(self, one: Logged, other: Logged) -> str:
        tools, now = _tools(one), _tools(other)
        first = next((i for i, (a, b) in enumerate(zip(tools, now, strict=False)) if a != b), -1)
        if first < 0:
            if len(tools) == len(now):
                return ""
            more = "added" if len(now) > len(tools) else "removed"
            return f"{_path(min(len(tools), len(now)))} was {more}"
        if sorted(tools) == sorted(now):
            return f"the tools came in another order, from {_path(first)} on"
        if len(now) != len(tools):
            return f"tools were {'added' if len(now) > len(tools) else 'removed'}, from {_path(first)} on"
        return f"{_path(first)} changed"

    def _messages(self, one: Logged, other: Logged) -> str:
        texts, now = _texts(one), _texts(other)
        for was, part in zip(texts, now, strict=False):
            if was[:3] != part[:3]:
                if was[:2] == part[:2] and len(now) >= len(texts):
                    return f"{part[0]} changed{self._where(was, part)}"
                return f"the history was rewritten from {was[0]} on"
        if len(now) < len(texts):
            return f"the history ends before {texts[len(now)][0]}"
        return self._answer(one, now[len(texts) :])

    def _answer(self, one: Logged, rest: list[Part]) -> str:
        """How the answer of the turn before came back, as the first of the ``rest`` of the messages."""
        sent = {part[0]: part for part in one.answer}
        returned = [part for part in rest if part[1] == "assistant"]
        if not returned or not sent:
            return ""
        message = returned[0][0].rpartition(".")[0]
        fields = {part[0].rpartition(".")[2]: part for part in returned if part[0].startswith(f"{message}.")}
        reasoning, content = sent.get("reasoning"), sent.get("content")
        if reasoning is not None and reasoning[3] and not fields.keys() & {"reasoning", "reasoning_content"}:
            return f"the answer came back without its reasoning of {reasoning[3]:,} bytes"
        part = fields.get("content")
        if content is not None and content[3] and part is not None and part[2] != content[2]:
            return f"the answer came back changed: {part[0]}{self._where(content, part)}"
        return ""

    def _where(self, was: Part, part: Part) -> str:
        """The bytes of a text that changed, in pieces; "": not known."""
        before, now = self._pieces.get(was[2]), self._pieces.get(part[2])
        if before is None or now is None:
            return ""
        one, other = _cut(before), _cut(now)
        first = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), -1)
        if first < 0:
            return f" from byte {min(len(one), len(other)) * PIECE:,} on"
        if was[3] != part[3]:
            return f" from a byte between {first * PIECE:,} and {first * PIECE + PIECE - 1:,} on"
        last = max(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        return f" within bytes {first * PIECE:,} to {min(part[3], (last + 1) * PIECE):,} of {part[3]:,}"


def _cut(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + PIECE_BYTES] for at in range(0, len(hashes), PIECE_BYTES)]


def _tools(logged: Logged) -> list[str]:
    return [part[2] for part in logged.parts if part[0].startswith("tools[")]


def _texts(logged: Logged) -> list[Any]:
    return [part for part in logged.parts if not part[0].startswith("tools[")]


def _path(index: int) -> str:
    return f"tools[{index}]"
