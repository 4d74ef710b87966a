"""A model of step time: how many seconds a prefill token, a decoding request or a draft token takes.

    step = constant + prefill tokens * a + decoding requests * b + draft tokens * c + context tokens * d

The coefficients are those of least squares over the *relative* error, because a long step varies more than a
short one, and none is negative. A step that took far longer than its work explains (a compilation, a pause)
loses weight. Four of five observations are fitted; the rest are *held out* and give the model's error. Where
the held-out steps don't follow the model, the model is refused, and with it every figure in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import isfinite, sqrt
from statistics import median
from typing import NamedTuple

import msgspec

from .step_times import StepSample

FEATURES = ("constant", "prefill_tokens", "decode_requests", "draft_tokens", "context_tokens")
CONSTANT, PREFILL, DECODE, DRAFT, CONTEXT = range(len(FEATURES))

LEAST_OBSERVATIONS = 64
"""Fewer observations are refused."""

LEAST_R2 = 0.5
"""A model that explains less of the variance of the held-out steps is refused."""

MOST_ERROR = 0.25
"""A model whose median relative error on the held-out steps is larger is refused."""

MOST_OUTLIERS = 0.1
"""A model that leaves a larger share of the held-out steps out as outliers is refused."""

OUTLIER = 6.0
"""An observation is an outlier if its relative error is so many times the usual one."""

LEAST_OUTLIER = 0.1
"""An observation with a smaller relative error is no outlier."""

DETERMINED = 0.5
"""A coefficient with a larger relative error is not known."""

HELD_OUT = 5
"""One of so many observations is held out."""

ROUNDS = 10
"""How often the weights are computed again."""

LEAST_USUAL = 1e-3
"""Floor of the usual relative error, for steps that follow the model exactly."""

Row = tuple[float, tuple[float, ...]]
"""Microseconds of an observation, and its features."""


class Coefficient(msgspec.Struct, frozen=True):
    """Seconds per unit of one feature, and twice its standard error. None: not known, or never seen."""

    seconds: float | None = None
    error: float | None = None


class StepModel(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted model, or why there is none (``refused``; "" if the model is accepted).

    ``r2``, ``relative_error`` (median) and ``absolute_error_seconds`` (median) are of the held-out
    observations. ``outliers`` is the share of these that no error includes.
    """

    refused: str
    observations: int = 0
    r2: float | None = None
    relative_error: float | None = None
    absolute_error_seconds: float | None = None
    outliers: float | None = None
    coefficients: dict[str, Coefficient] = {}
    decode_seconds: float | None = None
    """Seconds of one decoding request in one step, at its mean context."""

    @property
    def prefill_seconds(self) -> float | None:
        """Seconds per prefill token; None if not known."""
        return self._of(PREFILL)

    @property
    def draft_seconds(self) -> float | None:
        """Seconds per draft token; None if not known."""
        return self._of(DRAFT)

    def _of(self, feature: int) -> float | None:
        coefficient = self.coefficients.get(FEATURES[feature])
        return None if self.refused or coefficient is None else coefficient.seconds


NO_STEPS = StepModel(refused="no step was timed")


def fit(sample: StepSample) -> StepModel:
    """Fit a model to observations of :class:`~.step_times.StepTimes`."""
    return fitted_with(sample)[0]


def fitted_with(sample: StepSample, names: tuple[str, ...] = FEATURES) -> tuple[StepModel, tuple[float, ...]]:
    """The model over features ``names``, and the microseconds of each that predict best, known or not.

    Each row of the sample has a key, the features in this order, and microseconds. ``names`` begins with
    :data:`FEATURES`.
    """
    rows: list[Row] = [(float(row[-1]), tuple(map(float, row[1:-1]))) for row in sample.rows]
    if len(rows) < LEAST_OBSERVATIONS:
        refused = StepModel(
            refused=f"only {len(rows)} steps were timed, and a model takes {LEAST_OBSERVATIONS}",
            observations=len(rows),
        )
        return refused, ()
    fitted = [row for place, row in enumerate(rows) if place % HELD_OUT]
    betas, errors = _robust(fitted)
    return _judged(rows[::HELD_OUT], fitted, betas, errors, names), betas


def _judged(
    held_out: list[Row],
    fitted: list[Row],
    betas: Sequence[float],
    errors: _Errors,
    names: tuple[str, ...],
) -> StepModel:
    """The model with its error on ``held_out``, refused if the error is too large."""
    most = max(LEAST_OUTLIER, OUTLIER * errors.usual)
    inliers = [row for row in held_out if abs(_relative(row, betas)) <= most]
    outliers = 1 - len(inliers) / len(held_out)
    relative = median(abs(_relative(row, betas)) for row in held_out)
    absolute = median(abs(row[0] - _predicted(row, betas)) / row[1][0] for row in held_out) / 1e6
    r2 = _r2(inliers, betas)
    refused = ""
    if outliers > MOST_OUTLIERS:
        refused = f"{outliers:.0%} of the held-out steps are outliers, more than {MOST_OUTLIERS:.0%}"
    elif relative > MOST_ERROR:
        refused = f"the median error of the held-out steps is {relative:.0%}, more than {MOST_ERROR:.0%}"
    elif r2 is None or r2 < LEAST_R2:
        shown = "not known" if r2 is None else f"{r2:.2f}"
        refused = f"R² of the held-out steps is {shown}, less than {LEAST_R2}: step times don't follow work"
    return StepModel(
        refused=refused,
        observations=len(held_out) + len(fitted),
        r2=r2,
        relative_error=relative,
        absolute_error_seconds=absolute,
        outliers=outliers,
        coefficients={
            name: _coefficient(betas[place], errors.standard[place]) for place, name in enumerate(names)
        },
        decode_seconds=None if refused else _decode_seconds(fitted, betas, errors.standard),
    )


def _coefficient(beta: float, standard: float | None) -> Coefficient:
    if standard is None:
        return Coefficient()
    error = 2 * standard
    if error > DETERMINED * beta:
        return Coefficient(None, error / 1e6)
    return Coefficient(beta / 1e6, error / 1e6)


def _decode_seconds(
    rows: list[Row], betas: Sequence[float], standard: Sequence[float | None]
) -> float | None:
    """Seconds of a decoding request. Requests and their context rise together, so their sum is used."""
    requests = sum(features[DECODE] for _, features in rows)
    if not requests or (standard[DECODE] is None and standard[CONTEXT] is None):
        return None
    context = sum(features[CONTEXT] for _, features in rows) / requests
    return (betas[DECODE] + betas[CONTEXT] * context) / 1e6


# --- robust least squares -------------------------------------------------------------------------------


class _Errors(NamedTuple):
    """``usual``: the median relative error, scaled to a standard deviation. ``standard``: standard errors of
    the coefficients, in microseconds; None for a coefficient that is zero."""

    usual: float
    standard: tuple[float | None, ...]


def _robust(rows: list[Row]) -> tuple[tuple[float, ...], _Errors]:
    """Coefficients in microseconds, and their errors.

    The first round weights by the measured time, so that one long pause counts no more than a short step.
    Later rounds weight by the predicted time, and less where the error is beyond the usual one (Huber).
    """
    typical = median(y / features[0] for y, features in rows)
    floor = 0.1 * typical
    weights = [1 / max(y, floor * features[0]) ** 2 for y, features in rows]
    usual = LEAST_USUAL
    betas, normal, active = _least_squares(rows, weights)
    for _ in range(ROUNDS):
        relative = [_relative(row, betas) for row in rows]
        usual = max(LEAST_USUAL, 1.4826 * median(map(abs, relative)))
        weights = []
        for row, error in zip(rows, relative, strict=True):
            predicted = max(_predicted(row, betas), floor * row[1][0])
            weights.append(min(1.0, 1.5 * usual / max(abs(error), 1e-12)) / predicted**2)
        before = betas
        betas, normal, active = _least_squares(rows, weights)
        if all(abs(new - old) <= 1e-6 * abs(new) for new, old in zip(betas, before, strict=True)):
            break
    variance = sum(
        weight * (row[0] - _predicted(row, betas)) ** 2 for weight, row in zip(weights, rows, strict=True)
    ) / max(1, len(rows) - len(active))
    standard: list[float | None] = [None] * len(betas)
    inverse = _inverse([[normal[i][j] for j in active] for i in active])
    for place, feature in enumerate(active):
        if inverse is not None:
            standard[feature] = sqrt(max(0.0, variance * inverse[place][place]))
    return betas, _Errors(usual, tuple(standard))


def _least_squares(
    rows: list[Row], weights: list[float]
) -> tuple[tuple[float, ...], list[list[float]], tuple[int, ...]]:
    """The best coefficients of which none is negative, the normal matrix, and which are above zero.

    There are few features, so every subset of them is solved.
    """
    count = len(rows[0][1])
    normal = [[0.0] * count for _ in range(count)]
    right = [0.0] * count
    for (y, features), weight in zip(rows, weights, strict=True):
        for i in range(count):
            scaled = weight * features[i]
            if scaled:
                right[i] += scaled * y
                row = normal[i]
                for j in range(i, count):
                    row[j] += scaled * features[j]
    for i in range(count):
        for j in range(i):
            normal[i][j] = normal[j][i]
    seen = [i for i in range(count) if normal[i][i] > 0]
    best: tuple[float, tuple[int, ...], list[float]] = (0.0, (), [])
    for size in range(1, len(seen) + 1):
        for subset in combinations(seen, size):
            solution = _solve([[normal[i][j] for j in subset] for i in subset], [right[i] for i in subset])
            if solution is None or min(solution) < 0:
                continue
            explained = sum(beta * right[i] for beta, i in zip(solution, subset, strict=True))
            if explained > best[0] * (1 + 1e-12):
                best = (explained, subset, solution)
    betas = [0.0] * count
    for beta, i in zip(best[2], best[1], strict=True):
        betas[i] = beta
    return tuple(betas), normal, best[1]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve a small symmetric system; None if it is singular."""
    inverse = _inverse(matrix)
    if inverse is None:
        return None
    return [sum(a * b for a, b in zip(row, right, strict=True)) for row in inverse]


def _inverse(matrix: list[list[float]]) -> list[list[float]] | None:
    """The inverse of a small symmetric matrix with a positive diagonal; None if it is singular."""
    size = len(matrix)
    scale = [sqrt(matrix[i][i]) for i in range(size)]
    if not all(each > 0 and isfinite(each) for each in scale):
        return None
    work = [
        [matrix[i][j] / scale[i] / scale[j] for j in range(size)] + [float(i == j) for j in range(size)]
        for i in range(size)
    ]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(work[row][column]))
        if abs(work[pivot][column]) < 1e-9:
            return None
        work[column], work[pivot] = work[pivot], work[column]
        first = work[column][column]
        work[column] = [each / first for each in work[column]]
        for row in range(size):
            factor = work[row][column]
            if row != column and factor:
                work[row] = [a - factor * b for a, b in zip(work[row], work[column], strict=True)]
    return [[work[i][size + j] / scale[i] / scale[j] for j in range(size)] for i in range(size)]


def _predicted(row: Row, betas: Sequence[float]) -> float:
    return sum(beta * feature for beta, feature in zip(betas, row[1], strict=True))


def _relative(row: Row, betas: Sequence[float]) -> float:
    """The error of one observation, relative to its prediction."""
    predicted = _predicted(row, betas)
    return row[0] / predicted - 1 if predicted > 0 else 1e9


def _r2(rows: list[Row], betas: Sequence[float]) -> float | None:
    """The share of the variance of time per step that the model explains."""
    steps = sum(features[0] for _, features in rows)
    if len(rows) < 2 or not steps:
        return None
    mean = sum(y for y, _ in rows) / steps
    total = sum((y - mean * row[0]) ** 2 / row[0] for y, row in rows)
    if total <= 0:
        return None
    return 1 - sum((row[0] - _predicted(row, betas)) ** 2 / row[1][0] for row in rows) / total
