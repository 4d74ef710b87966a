"""The charts of the report as files: SVG, and PNG with the extra ``pictures``.

The shapes are those of the page (``charts.py``), on a white ground and with the axes named. PNG files are
drawn from the SVG by resvg, which needs no browser and no network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ...audit.errors import LedgerError
from ..files import whole
from ..templating import environment
from . import charts, html_page
from .html_data import PageData

WIDTH, HEIGHT = 800, 320
LEFT, RIGHT, TOP, BOTTOM = 72, WIDTH - 16, 44, HEIGHT - 60
BARS = (420, 650)
"""Where bars begin, and where the longest ends."""

COLORS = ("#2f6fd0", "#d98413", "#7d8793", "#c3c9cf")
"""Those of the page on a light ground."""

PNG_SCALE = 2

TITLES = {
    "prompt-tokens": "Where prompt tokens came from",
    "hit-rate": "Hit rate over time",
    "requests": "Running and waiting requests",
    "preemptions": "Preemptions over time",
    "misses": "Why prompt tokens missed the cache",
    "first-token": "Mean time to first token by cause",
    "waits": "Requests by time spent waiting",
    "block-states": "Blocks by state over time",
    "evictions": "Evicted blocks over time",
}


def drawings(data: PageData) -> Iterator[tuple[str, str]]:
    """The name and the SVG of each chart that has data."""
    template = environment(html_page.TEMPLATES).get_template("picture.svg.j2")
    for name, chart in html_page.plots(data).items():
        bars = chart if isinstance(chart, list) else []
        height = HEIGHT if isinstance(chart, charts.Plot) else 60 + 26 * len(bars)
        middle = (TOP + BOTTOM) / 2
        plot = chart if isinstance(chart, charts.Plot) else None
        ticks = [(TOP, plot.top), (middle, plot.half), (BOTTOM, "0")] if plot else []
        yield (
            name,
            template.render(
                title=TITLES[name],
                width=WIDTH,
                height=height,
                left=LEFT,
                right=RIGHT,
                top=TOP,
                bottom=BOTTOM,
                start=BARS[0],
                stop=BARS[1],
                colors=COLORS,
                plot=plot,
                ticks=ticks,
                bars=bars,
            ),
        )


def save(data: PageData, svg: Path | None, png: Path | None) -> list[Path]:
    """Write the charts into folders, one file each; returns their paths. Raises LedgerError.

    ``png`` needs the extra ``pictures``.
    """
    drawn = dict(drawings(data)) if svg or png else {}
    written = _write(svg, "svg", {name: text.encode() for name, text in drawn.items()}) if svg else []
    if png:
        import resvg_py

        images = {
            name: bytes(resvg_py.svg_to_bytes(svg_string=text, zoom=PNG_SCALE))
            for name, text in drawn.items()
        }
        written += _write(png, "png", images)
    return written


def _write(folder: Path, suffix: str, files: Mapping[str, bytes]) -> list[Path]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LedgerError(f"{folder} can't be written: {error.strerror}.") from error
    paths = []
    for name, content in files.items():
        path = folder / f"{name}.{suffix}"
        with whole(path) as draft:
            draft.write_bytes(content)
        paths.append(path)
    return paths
