"""Text from outside, made safe to print: request ids, model names, messages.

Request ids and model names are clients' text. A terminal obeys control characters, and format characters
change the order in which text is shown. A reader replaces both in every event that it reads, so everything
behind the reader holds printable text only.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any, get_args

from msgspec.structs import fields, replace

from . import events as ev
from .events import AnyEvent

ID_CHARACTERS = 256
"""A longer request id is cut to this length, in journals and in everything that is read from one."""

TEXT_CHARACTERS = 4096
"""Other text is cut to this length when it is read."""


MOST_PRIORITY = (1 << 63) - 1


def printable(text: str) -> str:
    """``text`` with every character that is not printable written as in a Python string: ``\\x1b``."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text
    )


def failure(error: BaseException) -> str:
    """The type of an exception and the line that raised it: its text may hold what a client sent."""
    at, place = "", error.__traceback__
    while place is not None:
        at = f" at {place.tb_frame.f_code.co_filename.rpartition('/')[2]}:{place.tb_lineno}"
        place = place.tb_next
    return type(error).__name__ + at


def utc(seconds: float, *, milliseconds: bool = False) -> str:
    """A Unix time for a person, in UTC. A journal can hold any number, also one that is no date."""
    try:
        text = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"Unix time {seconds:.0f}"
    return f"{text}.{int(seconds % 1 * 1000):03} UTC" if milliseconds else f"{text} UTC"


def counted(n: int, noun: str, plural: str = "") -> str:
    """1 request, 2 requests."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {plural or f'{noun}s'}"


def salt_name(labels: ev.RequestLabels) -> str:
    """The class of the cache salt in hexadecimal; "": no salt."""
    return f"{labels.salt_class & (1 << 64) - 1:016x}" if labels.salt_class else ""


TENANT = ("group", "salt")
"""The labels of a request that say whose it is; the first one that it has counts, here and in SQL."""


def tenant_of(labels: ev.RequestLabels | None) -> str:
    """The group of a request, else the class of its cache salt; "": not known."""
    if labels is None:
        return ""
    named = {"group": labels.group, "salt": salt_name(labels)}
    return next((named[label] for label in TENANT if named[label]), "")


def session_of(labels: ev.RequestLabels | None) -> str:
    """The session of a request; "": it has none, or it was not recorded."""
    return "" if labels is None else labels.session


def cut_id(request_id: str) -> str:
    """A request id of at most ``ID_CHARACTERS``; of a longer one the beginning and a digest of all of it."""
    if len(request_id) <= ID_CHARACTERS:
        return request_id
    digest = hashlib.blake2b(request_id.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"{request_id[: ID_CHARACTERS - len(digest) - 1]}~{digest}"


def cut_priority(priority: int) -> int:
    """A priority as events hold it: one beyond 64 bits, which a client may ask for, is the last of them."""
    return max(-MOST_PRIORITY, min(priority, MOST_PRIORITY))


def shown_id(request_id: str) -> str:
    """A request id as accounts, findings and reports hold it: cut, and printable."""
    if len(request_id) <= ID_CHARACTERS and request_id.isprintable():
        return request_id
    return cut_id(printable(cut_id(request_id)))


def clean(events: list[Any]) -> None:
    """Replace each event of a batch whose text is not printable, or too long, by one with safe text."""
    for place, event in enumerate(events):
        for name, safe in _CLEANERS.get(type(event), ()):
            text = getattr(event, name)
            if text and (new := safe(text)) is not text and new != text:
                events[place] = event = replace(event, **{name: new})


def _text(value: str | None) -> str | None:
    if value is None or (len(value) <= TEXT_CHARACTERS and value.isprintable()):
        return value
    return printable(value)[:TEXT_CHARACTERS]


def _texts(values: Sequence[str] | None) -> Sequence[str] | None:
    if values is None or "".join(values).isprintable():
        return values
    return [printable(value) for value in values]


def _ids(values: list[str]) -> list[str]:
    return [shown_id(value) for value in values]


def _settings(values: dict[str, ev.Setting]) -> dict[str, ev.Setting]:
    return {
        printable(name): _text(value) if isinstance(value, str) else value for name, value in values.items()
    }


def _counts(values: dict[str, int]) -> dict[str, int]:
    return {shown_id(name): count for name, count in values.items()}


def _labels(labels: ev.RequestLabels | None) -> ev.RequestLabels | None:
    if labels is None or (labels.lora + labels.group + labels.session).isprintable():
        return labels
    shown = {name: printable(getattr(labels, name)) for name in ("lora", "group")}
    return replace(labels, **shown, session=shown_id(labels.session))


def _rows(rows: list[ev.SnapshotRow]) -> list[ev.SnapshotRow]:
    return [_row(row) for row in rows]


def _row(row: ev.SnapshotRow) -> ev.SnapshotRow:
    safe, labels = shown_id(row.request_id), _labels(row.labels)
    if safe is row.request_id and labels is row.labels:
        return row
    return replace(row, request_id=safe, labels=labels)


_IDS: dict[tuple[str, Any], Callable[[Any], Any]] = {
    ("request_id", str): shown_id,
    ("received", list[str]): _ids,
    ("failed", list[str]): _ids,
    ("sent", list[str]): _ids,
}
"""What makes fields of these names and types safe: they hold request ids."""

_BY_TYPE: dict[Any, Callable[[Any], Any]] = {
    str: _text,
    str | None: _text,
    list[str]: _texts,
    list[str] | None: _texts,
    Sequence[str]: _texts,
    dict[str, ev.Setting]: _settings,
    dict[str, int]: _counts,
    list[ev.SnapshotRow]: _rows,
    ev.RequestLabels | None: _labels,
}
"""What makes the fields of these types safe."""


def _cleaners(kind: Any) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    """The fields of an event that hold text, each with what makes the text safe."""
    named = [
        (field.name, _IDS.get((field.name, field.type)) or _BY_TYPE.get(field.type)) for field in fields(kind)
    ]
    return tuple((name, safe) for name, safe in named if safe is not None)


_CLEANERS = {kind: found for kind in get_args(AnyEvent) if (found := _cleaners(kind))}
