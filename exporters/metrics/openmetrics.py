"""The OpenMetrics text format, for scrapes and for past times.

``prometheus_client`` writes the format too, but looks at each character of each name of each sample, which
took most of a scrape. Format: https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.utils import floatToGoString

END = "# EOF\n"


def heading(name: str, kind: str, unit: str, help: str) -> str:
    """The lines before the samples of a family."""
    of_unit = f"# UNIT {name} {unit}\n" if unit else ""
    return f"# TYPE {name} {kind}\n{of_unit}# HELP {name} {escaped(help)}\n"


def exposition(families: Iterable[Family]) -> str:
    """All samples of ``families``, which have no timestamps."""
    lines = []
    numbers: dict[float, str] = {}
    for family in families:
        lines.append(heading(family.name, family.type, family.unit, family.documentation))
        for sample in family.samples:
            value = numbers.get(sample.value)
            if value is None:
                value = numbers[sample.value] = number_text(sample.value)
            labels = f"{{{labels_text(sample.labels)}}}" if sample.labels else ""
            exemplar = ""
            if (shown := sample.exemplar) is not None:
                at = "" if shown.timestamp is None else f" {shown.timestamp}"
                exemplar = f" # {{{labels_text(shown.labels)}}} {number_text(shown.value)}{at}"
            lines.append(f"{sample.name}{labels} {value}{exemplar}\n")
    return "".join([*lines, END])


def labels_text(labels: Mapping[str, str]) -> str:
    """Labels as they stand between braces."""
    return ",".join([f'{name}="{escaped(value)}"' for name, value in labels.items()])


def number_text(value: float) -> str:
    """A number as the format writes it."""
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def escaped(text: str) -> str:
    """Text as it stands between quotes."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
