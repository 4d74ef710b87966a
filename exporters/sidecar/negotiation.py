"""Which format and encoding a scraper accepts, by RFC 9110.

prometheus_client reads the same headers without their weights, and raises on some of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

OPENMETRICS = "application/openmetrics-text"
TEXT = "text/plain"

_WEIGHT = re.compile(r"0(\.\d{0,3})?|1(\.0{0,3})?")
_VERSION = re.compile(r"(\d{1,3})\.\d{1,3}\.\d{1,3}")


class Range(NamedTuple):
    """One element of an ``Accept`` or ``Accept-Encoding`` header. ``place``: its number in the header."""

    name: str
    parameters: dict[str, str]
    weight: float
    place: int


def ranges(header: str) -> list[Range]:
    """The elements of a header, without those whose weight is malformed."""
    found = []
    for place, element in enumerate(header.split(",")):
        name, *rest = (part.strip() for part in element.split(";"))
        parameters = {
            key.strip().lower(): text.strip().strip('"')
            for key, _, text in (part.partition("=") for part in rest)
        }
        weight = parameters.get("q", "1")
        if name and _WEIGHT.fullmatch(weight):
            found.append(Range(name.lower(), parameters, float(weight), place))
    return found


def accepted_format(header: str) -> str:
    """The format that an ``Accept`` header likes best, else plain text."""
    found = ranges(header)
    offers = [(*_liking(offer, found), offer) for offer in (TEXT, OPENMETRICS)]
    weight, _, offer = max(offers, key=lambda liking: liking[:2])
    return offer if weight else TEXT


def accepts_gzip(header: str) -> bool:
    """Whether an ``Accept-Encoding`` header asks for gzip."""
    return any(one.name == "gzip" and one.weight > 0 for one in ranges(header))


def _liking(offer: str, found: Sequence[Range]) -> tuple[float, int]:
    """The weight of a format, and minus its place in the header; the closest match counts."""
    kinds = offer.partition("/")[0] + "/*", "*/*"
    matches = _exact(offer, found)
    for kind in kinds:
        matches = matches or [one for one in found if one.name == kind]
    return max(((one.weight, -one.place) for one in matches), default=(0.0, 0))


def _exact(offer: str, found: Sequence[Range]) -> list[Range]:
    """The elements that name a format in a version that can be answered."""
    return [
        one
        for one in found
        if one.name == offer and (offer == TEXT or _first(one.parameters.get("version", "1.0.0")) >= 1)
    ]


def _first(version: str) -> int:
    """The first number of a version; 0 for what is no version."""
    match = _VERSION.fullmatch(version)
    return int(match[1]) if match else 0
