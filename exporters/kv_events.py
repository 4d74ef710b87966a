"""Record an engine's stream of KV events as a journal: ``kvledger journals record-events``.

vLLM publishes batches over ZeroMQ, numbered from 0, and repeats past batches on a second socket if
``replay_endpoint`` is configured. A batch is asked for again when numbers are missing, and all batches when
the recording begins. Token ids, salts and adapters are dropped when a batch is decoded; hashes become the
hash ids of ``KVLEDGER_EVENTS_KEY``, so that they can be compared with the engine's own journal. A keyed hash
of the tokens alone tells which blocks differ by their salt or adapter only.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from math import inf
from operator import ne
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from ..audit import events as ev
from ..audit.bounded_tables import keep_newest
from ..audit.errors import LedgerError
from ..audit.hash_key import VARIABLE, HashKey, from_environment
from ..audit.journal.catalogue import KV_EVENTS
from ..audit.journal.recorder import Recorder, microseconds_since
from ..audit.ledger.kv_events import GPU
from ..audit.text import printable

POLL_MS = 200
"""How long a wait for the next batch is, at most."""

SILENT_SECONDS = 10.0
"""After so long without a batch it is said if nothing listens at the address."""

REPLAY_MS = 5_000
"""How long the publisher may take to answer a request to repeat batches."""

MOST_REPLAYED_BYTES = 512 << 20
MOST_MESSAGE_BYTES = 64 << 20
"""A larger batch is dropped by ZeroMQ, and is missing."""

END = (1 << 64) - 1
"""The sequence number that ends an answer: -1 in eight bytes."""

CODES = {"BlockStored": ev.STORED, "BlockRemoved": ev.REMOVED_BLOCKS, "AllBlocksCleared": ev.CLEARED}

FIELDS = {
    ev.STORED: (
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
    ),
    ev.REMOVED_BLOCKS: ("type", "block_hashes", "medium", "group_idx"),
    ev.CLEARED: ("type",),
}
"""The fields of a KV event up to vLLM 0.23, which are an array there. Later releases send a map."""

MOST_NAME_CHARACTERS = 64
NOT_GIVEN = (-1, 0, 0)
"""What :func:`_details` makes of a store that says nothing else."""

MOST_CONTENTS = 1 << 18
"""Blocks whose tokens' hash is kept, for the blocks that follow them."""


class Received(NamedTuple):
    """One message of the publisher."""

    sequence: int
    payload: bytes
    replayed: bool


# --- decoding -----------------------------------------------------------------------------------------


class Contents:
    """The keyed hash of the tokens of the blocks that were announced last, by hash id."""

    def __init__(self, key: HashKey) -> None:
        self._key = key
        self._of: dict[int, int] = {}
        """By hash id: the keyed hash of all tokens up to the end of the block, the oldest first."""

    def of(self, fields: Mapping[str, Any], above: int, ids: Sequence[int]) -> list[int]:
        """For each block of a store: the hash of its tokens and all before; 0: those are not known.

        Where the tokens are more than the blocks hold, blocks were left out: of a sliding window the first
        ones, which are outside it; else nothing tells which. An offloading tier tells no tokens at all.
        """
        tokens, size = fields["token_ids"], int(fields["block_size"])
        left_out = len(tokens) // size - len(ids) if size > 0 else 0
        if (
            not tokens
            or size <= 0
            or (left_out > 0 and "window" not in str(fields.get("kv_cache_spec_kind")))
        ):
            return [0] * len(ids)
        content = self._of.get(above, 0)
        found = []
        for place, hash_id in enumerate([*[0] * left_out, *ids]):
            part = tokens[place * size : (place + 1) * size]
            known = len(part) == size and (content or not (above or place))
            content = self._key.of_tokens(content, part) if known else 0
            if place < left_out:
                continue
            found.append(content)
            if content:
                self._of.pop(hash_id, None)
                self._of[hash_id] = content
        keep_newest(self._of, MOST_CONTENTS)
        return found


def decoded(
    message: Received,
    at: int,
    stream: int,
    key: HashKey,
    decode: Any = msgspec.msgpack.decode,
    contents: Contents | None = None,
) -> ev.KVEventsReceived:
    """One batch as an event of the journal. What can't be read is counted and left out."""
    rows: list[int] = []
    found: list[int] = []
    details: list[int] = []
    tiers: list[str] = []
    kinds: list[str] = []
    unreadable, seconds, rank = 0, 0.0, -1
    try:
        batch = decode(message.payload)
        seconds, published = float(batch[0]), _list(batch[1])
        if not 0 <= seconds <= LATEST_SECONDS:
            raise ValueError(seconds)
        rank = _int64(batch[2]) if len(batch) > 2 and batch[2] is not None else -1
    except UNREADABLE:
        published, unreadable, seconds, rank = [], 1, 0.0, -1
    for event in published:
        try:
            row = _row(event, tiers, key)
            fields = _fields(event, row[0])
            if row[0] == ev.STORED:
                of_store = _details(fields, kinds, key)
                if contents is not None:
                    found += contents.of(fields, row[4], row[ev.KV_HEAD :])
                details += of_store
            rows += row
        except UNREADABLE:
            unreadable += 1
    if not any(map(ne, details, cycle(NOT_GIVEN))):
        details = []
    return ev.KVEventsReceived(
        at,
        stream,
        message.sequence,
        seconds,
        rank,
        tiers,
        rows,
        message.replayed,
        unreadable,
        found,
        details,
        kinds,
    )


UNREADABLE = (
    msgspec.MsgspecError,
    AttributeError,
    LookupError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a batch of a publisher can raise that is none, or none of vLLM's."""

LATEST_SECONDS = 1e11
"""Unix time in the year 5138: a batch of another time is of no engine."""


def _int64(value: Any) -> int:
    """A whole number that a journal can hold. Raises ValueError for another."""
    number = int(value)
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(number)
    return number


def _list(value: Any) -> list[Any]:
    """Raises TypeError for anything but a list."""
    if not isinstance(value, list):
        raise TypeError(value)
    return value


def _row(event: Any, tiers: list[str], key: HashKey) -> list[int]:
    """A KV event as a row of ``KVEventsReceived``, without its token ids."""
    code = CODES[event["type"] if isinstance(event, dict) else event[0]]
    fields = _fields(event, code)
    if code == ev.CLEARED:
        return [code, -1, -1, 0, 0, 0]
    group, medium, parent = fields.get("group_idx"), fields.get("medium"), fields.get("parent_block_hash")
    number = -1 if group is None else _int64(group)
    elsewhere = [fields.get("locality"), fields.get("ownership")]
    if medium == GPU and elsewhere == ["LOCAL", None]:
        elsewhere = []
    tier = _place(tiers, " ".join(str(each) for each in (medium, *elsewhere) if each is not None))
    ids = [key.of_published(each, number) for each in _list(fields["block_hashes"])]
    above = 0 if parent is None else key.of_published(parent, number)
    return [code, number, tier, _int64(fields.get("block_size") or 0), above, len(ids), *ids]


def _details(fields: Mapping[str, Any], kinds: list[str], key: HashKey) -> list[int]:
    """What else a store says: the kind of its group, flags, and the session that caused it."""
    window = fields.get("kv_cache_spec_sliding_window")
    words = [each for each in (fields.get("kv_cache_spec_kind"), window) if each is not None]
    adapter = fields.get("lora_id") is not None or fields.get("lora_name") is not None
    keyed = adapter or any(_list(fields.get("extra_keys") or []))
    session = fields.get("session_id")
    return [
        _place(kinds, " ".join(map(str, words))),
        keyed * ev.KEYED + (fields.get("lookahead_token_ids") is not None) * ev.LOOKAHEAD,
        0 if session is None else key.of_tokens(0, list(str(session).encode())),
    ]


def _place(names: list[str], name: str) -> int:
    """The place of a name in a list, to which it is added; -1 of an empty one."""
    if not name:
        return -1
    name = printable(name)[:MOST_NAME_CHARACTERS]
    if name not in names:
        names.append(name)
    return names.index(name)


def _fields(event: Any, code: int) -> Mapping[str, Any]:
    """The fields of a KV event by name."""
    return event if isinstance(event, dict) else dict(zip(FIELDS[code], event, strict=False))


# --- receiving ----------------------------------------------------------------------------------------


class Subscription:
    """The publisher's sockets. Raises LedgerError if pyzmq is missing or an address is none."""

    def __init__(self, endpoint: str, replay: str = "", topic: str = "") -> None:
        try:
            import zmq
        except ImportError:
            raise LedgerError("KV events need pyzmq, which vLLM installs: pip install pyzmq.") from None
        self._zmq = zmq
        """The module pyzmq, which only this command needs."""
        self._context = zmq.Context()
        """The context of all sockets; its end closes them."""
        self._replay_address = replay
        """Where the publisher repeats batches; empty if it does not."""
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
        self._socket.set_hwm(100_000)
        try:
            self._socket.connect(endpoint)
            if replay:
                self._asking().close()
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise LedgerError(f"{endpoint} or {replay} is no address of ZeroMQ: {error}.") from None

    def _asking(self) -> Any:
        socket = self._context.socket(self._zmq.DEALER)
        socket.setsockopt(self._zmq.LINGER, 0)
        socket.setsockopt(self._zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
        socket.connect(self._replay_address)
        return socket

    def next(self) -> Received | None:
        """The next batch that the publisher sends; None if none comes within a short time."""
        if not self._socket.poll(POLL_MS):
            return None
        frames = self._socket.recv_multipart()
        return _message(frames, replayed=False)

    def replayed(self, first: int) -> list[Received]:
        """The batches from number ``first`` up that the publisher repeats; none without an answer.

        An answer that does not end is cut off.
        """
        if not self._replay_address:
            return []
        socket, answer, size = self._asking(), list[Received](), 0
        try:
            socket.send_multipart((b"", first.to_bytes(8, "big")))
            while size < MOST_REPLAYED_BYTES and socket.poll(REPLAY_MS):
                message = _message(socket.recv_multipart(), replayed=True)
                if message is None or message.sequence == END:
                    break
                answer.append(message)
                size += len(message.payload) + 100
        finally:
            socket.close()
        return answer

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(0)


def _message(frames: Sequence[bytes], *, replayed: bool) -> Received | None:
    """The last two frames are the number and the batch, in all releases and on both sockets."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        return None
    sequence = int.from_bytes(frames[-2], "big")
    if sequence >= 1 << 63 and sequence != END:  # no engine gets so far, and no journal holds it
        return None
    return Received(sequence, frames[-1], replayed)


# --- recording ----------------------------------------------------------------------------------------


class Sums(msgspec.Struct):
    """What a recording received."""

    batches: int = 0
    replayed: int = 0
    missing: int = 0
    restarts: int = 0
    unreadable: int = 0


class EventRecorder:
    """Writes the batches of one publisher to a journal in ``folder``.

    ``number`` tells the recorders of one process apart.
    """

    def __init__(self, folder: Path, source: Any, key: HashKey, endpoint: str, number: int = 0) -> None:
        self.sums = Sums()
        """What was received so far."""
        self.path = folder / f"{KV_EVENTS}{time.time_ns() // 1_000_000}-{os.getpid()}-{number}"
        """The journal."""
        self._source, self._key, self._endpoint = source, key, endpoint
        """Where batches come from, the key of their hashes, and the publisher's address."""
        self._recorder = Recorder(self.path)
        self._contents = Contents(key)
        """The hashes of the tokens of recent blocks."""
        self._began = time.monotonic()
        """Monotonic time, in seconds, from which the times in the journal count."""
        self._stream = 0
        """How often the publisher was seen to begin anew."""
        self._expected = 0
        self._restart()

    def run(self, stop: threading.Event, say: Callable[[str], object] = str) -> None:
        """Record until ``stop`` is set. ``say`` gets a sentence if nothing publishes there."""
        for message in self._source.replayed(0):
            self._take(message)
        silent_until = time.monotonic() + SILENT_SECONDS
        while not stop.is_set():
            message = self._source.next()
            if message is not None:
                self._receive(message)
            elif not self.sums.batches and time.monotonic() > silent_until:
                silent_until = inf
                if not listens(self._endpoint):
                    say(
                        f"nothing listens at {self._endpoint} yet. An engine whose endpoint in "
                        "--kv-events-config has no * connects to it and does not listen: tcp://*:5557 does"
                    )
        self._recorder.close("exit", 5.0)

    def _receive(self, message: Received) -> None:
        """Take one batch, after the missing ones before it if the publisher repeats them."""
        if message.sequence < self._expected:
            if not self._begins_anew(message):
                return
            self._stream += 1
            self.sums.restarts += 1
            self._expected = 0
        if message.sequence > self._expected:
            for earlier in self._source.replayed(self._expected):
                if self._expected <= earlier.sequence < message.sequence:
                    self._take(earlier)
        self._take(message)

    def _begins_anew(self, message: Received) -> bool:
        """Whether a number that came before is of a restarted publisher: it was published later."""
        return decoded(message, 0, 0, self._key).published_seconds > self._published

    _published = 0.0
    """When the last batch was published."""

    def _take(self, message: Received) -> None:
        if self._recorder.wants_snapshot:
            self._restart()
        at = microseconds_since(self._began)
        event = decoded(message, at, self._stream, self._key, contents=self._contents)
        self._recorder.record(event)
        self.sums.missing += max(0, message.sequence - self._expected)
        self.sums.batches += 1
        self.sums.replayed += message.replayed
        self.sums.unreadable += event.unreadable
        self._expected = message.sequence + 1
        self._published = max(self._published, event.published_seconds)

    def _restart(self) -> None:
        """Begin a segment."""
        from .. import __version__

        at = microseconds_since(self._began)
        port = _port(self._endpoint)
        settings: dict[str, ev.Setting] = {"hash_key": self._key.print, "kv_events_port": port}
        started = ev.EngineStarted(
            at, time.time(), "kv-events", __version__, "zmq", "events", os.getpid(), settings
        )
        self._recorder.restart(started, ev.Snapshot(at, 0, [], 0))


def listens(endpoint: str) -> bool:
    """Whether something accepts connections at an address of TCP; of another kind, it is not known: yes."""
    try:
        address = urlsplit(endpoint)
        if address.scheme != "tcp" or not address.hostname or not address.port:
            return True
        socket.create_connection((address.hostname, address.port), timeout=1.0).close()
    except (OSError, ValueError):
        return False
    return True


def _port(endpoint: str) -> int:
    try:
        return urlsplit(endpoint).port or 0
    except ValueError:
        return 0


def key() -> HashKey:
    """The key that the environment sets. Raises LedgerError without one."""
    found = from_environment()
    if found is None:
        raise LedgerError(
            f"Set {VARIABLE} to the same secret of 16 or more characters as in the engine's environment."
        )
    return found


def record(
    folder: Path,
    endpoint: str,
    replay: str,
    topic: str,
    stop: threading.Event,
    say: Callable[[str], object] = str,
) -> Iterator[str]:
    """Record until ``stop`` is set; yields a line at the beginning and one at the end.

    ``say`` gets a sentence after ten seconds in which nothing published.
    """
    secret = key()
    source = Subscription(endpoint, replay, topic)
    try:
        recorder = EventRecorder(folder, source, secret, endpoint)
        yield f"recording the KV events of {endpoint} in {recorder.path}"
        recorder.run(stop, say)
        sums = recorder.sums
        yield (
            f"{sums.batches:,} batches, {sums.replayed:,} of them replayed; {sums.missing:,} missing; "
            f"{sums.restarts:,} restarts of the publisher; {sums.unreadable:,} unreadable KV events"
        )
    finally:
        source.close()
