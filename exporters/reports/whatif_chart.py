"""The hit-rate curve as one SVG drawing with labelled axes."""

from __future__ import annotations

from math import log2
from typing import NamedTuple

from ...audit.analysis.whatif import SizePoint, WhatIf

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 12, 44
"""Margins, for the ticks and the names of the axes."""


class Tick(NamedTuple):
    """A mark of an axis: its place and its text."""

    place: float
    text: str


class Line(NamedTuple):
    """One policy: its points as SVG wants them, and each point with its text."""

    policy: str
    color: int
    points: str
    dots: list[tuple[float, float, str]]


class Chart(NamedTuple):
    """The drawing. ``present`` is the place of the recorded size; None: there is none."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    across: list[Tick]
    up: list[Tick]
    lines: list[Line]
    ideal: float
    ideal_text: str
    present: float | None


def curve_chart(one: WhatIf) -> Chart:
    """The curve of one engine; sizes are on a logarithmic axis."""
    sizes = sorted({point.blocks for point in one.curve if point.blocks})
    low, high = log2(min(sizes, default=1)), log2(max(sizes, default=1))
    most = max([point.hit_share for point in one.curve] + [one.ideal.hit_share, 0.05])
    top = min(1.0, -(-most * 10 // 1) / 10)

    def across(blocks: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (log2(blocks) - low) / ((high - low) or 1)

    def up(share: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share / top

    def line(policy: str, color: int) -> Line:
        points = [point for point in one.curve if point.policy == policy and point.blocks]
        dots = [(across(point.blocks or 1), up(point.hit_share), _text(point)) for point in points]
        return Line(policy, color, " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in dots), dots)

    policies = list(dict.fromkeys(point.policy for point in one.curve))
    step = max(1, -(-len(sizes) // 8))
    return Chart(
        WIDTH,
        HEIGHT,
        LEFT,
        WIDTH - RIGHT,
        TOP,
        HEIGHT - BOTTOM,
        [Tick(across(blocks), f"{blocks:,}") for blocks in sizes[::step]],
        [Tick(up(top * part / 4), f"{100 * top * part / 4:.0f} %") for part in range(5)],
        [line(policy, color) for color, policy in enumerate(policies)],
        up(one.ideal.hit_share),
        f"no limit: {100 * one.ideal.hit_share:.1f} %",
        across(one.blocks) if one.blocks in sizes else None,
    )


def _text(point: SizePoint) -> str:
    return f"{point.blocks:,} blocks, {point.policy}: {100 * point.hit_share:.1f} %"
