"""Values as Grafana writes them, for the units that the boards use (https://grafana.com/docs/grafana/latest/)."""

from __future__ import annotations

import math
from datetime import datetime, timezone

_SI = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_SHORT = ((1e12, " Tri"), (1e9, " Bil"), (1e6, " Mil"), (1e3, " K"))
_SECONDS = (
    (86_400.0, " d"),
    (3_600.0, " h"),
    (60.0, " min"),
    (1.0, " s"),
    (1e-3, " ms"),
    (1e-6, " µs"),
    (1e-9, " ns"),
)
_RATES = {"cps": " c/s", "reqps": " req/s"}


def text(value: float, unit: str) -> str:
    """``value`` with its unit."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if unit == "percentunit":
        return f"{number(100 * value)}%"
    if unit == "s":
        size, word = next((row for row in _SECONDS if abs(value) >= row[0]), (1.0, " s"))
        return f"{number(value / size)}{word}"
    if unit == "dateTimeAsIso":
        return f"{datetime.fromtimestamp(value / 1e3, timezone.utc):%Y-%m-%d %H:%M:%S}"
    if unit == "locale":
        return f"{value:,.0f}" if value == round(value) else f"{value:,.2f}"
    if unit.startswith("si:"):
        size, prefix = next((row for row in _SI if abs(value) >= row[0]), (1.0, ""))
        return f"{number(value / size)} {prefix}{unit.removeprefix('si:')}"
    if unit == "none":
        return number(value)
    size, word = next((row for row in _SHORT if abs(value) >= row[0]), (1.0, ""))
    return f"{number(value / size)}{word}{_RATES.get(unit, '')}"


def number(value: float) -> str:
    """At least three significant digits, without trailing zeros."""
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    shown = f"{value:.{min(digits, 9)}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown
