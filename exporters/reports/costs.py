"""What lost work cost: seconds, share of engine time, delay, money; and times to tokens by cause.

:mod:`kvledger.audit.analysis.costs` computes the figures. Everything in seconds of lost work is an
estimate by a model of step time, whose error stands beside it; waiting is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ...audit.analysis.costs import (
    OVERRUN,
    REJECTED,
    REWORK,
    Costs,
    LostWork,
    MoreBlocks,
    PricedDelays,
    priced,
)
from ...audit.analysis.step_model import StepModel, fit
from ...audit.analysis.step_times import StepSums
from ...audit.causes import FIRST_TOKEN, QUEUED, loss
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.observers import Lost, Steps
from ..answer import DIM, Lines, Part, Table, Words, counted, decimal, listed, made, percent
from ..answer import milliseconds as shown

LEGEND = (
    "Seconds are tokens times the time that a token takes in these steps, without the constant time of a "
    "step. First token: how much later the first token of the requests concerned came."
)


class CostRow(msgspec.Struct, frozen=True, kw_only=True):
    """Lost work of one kind and cause. ``share`` is of engine time, 1 for all.

    ``first_token_*``: how much later the first token came, of the requests that lost work before it. None:
    not known.
    """

    kind: str
    cause: str
    text: str
    tokens: int
    requests: int
    seconds: float | None
    share: float | None
    first_token_requests: int
    first_token_median_seconds: float | None
    first_token_p95_seconds: float | None
    money: float | None
    more_blocks: MoreBlocks | None = None
    """The fewest blocks that would have avoided nine tenths of the tokens, from block events."""


class LoadRow(msgspec.Struct, frozen=True, kw_only=True):
    """External loads of one connector.

    ``waited_seconds`` is measured, for asynchronous loads; ``vain_seconds`` of it led to no loaded token.
    ``saved_seconds``: what computing the loaded tokens would have taken;
    ``asynchronous_saved_seconds`` is the part of the asynchronous loads. ``not_saved_*``: tokens that were
    promised, and computed because their load failed or did not happen.
    """

    connector: str
    asynchronous_loads: int
    asynchronous_tokens: int
    synchronous_tokens: int
    waited_seconds: float
    vain_seconds: float
    saved_seconds: float | None
    asynchronous_saved_seconds: float | None
    not_saved_tokens: int
    not_saved_seconds: float | None


class FirstToken(msgspec.Struct, frozen=True):
    """How much later the first token of some requests came. None: not known."""

    requests: int = 0
    median_seconds: float | None = None
    p95_seconds: float | None = None


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """The model of one engine's step time, and the time of all its steps."""

    engine: str
    engine_seconds: float
    model: StepModel


class CostReport(msgspec.Struct, frozen=True, kw_only=True):
    """What lost work cost, most seconds first. ``engine_seconds``: time of all steps, measured."""

    engine_seconds: float
    lost_seconds: float | None
    lost_share: float | None
    money: float | None
    rows: list[CostRow]
    loads: list[LoadRow]
    models: list[ModelRow]


def model_row(engine: str, busy_us: int, model: StepModel) -> ModelRow:
    """The model of one engine, whose steps took so many microseconds."""
    return ModelRow(engine=engine, engine_seconds=busy_us / 1e6, model=model)


def gathered(engine_audits: Sequence[EngineAudit]) -> tuple[Costs, list[ModelRow]]:
    """The costs of all engines together, each by its own model; no seconds where no step was observed."""
    costs, models = Costs(), []
    for engine_audit in engine_audits:
        steps = engine_audit.observer(Steps)
        sums = StepSums() if steps is None else steps.sums
        model = fit(sums.sample)
        costs.merge(priced(engine_audit.of(Lost).sums, model, sums.busy_us, engine_audit.connector))
        models.append(model_row(engine_audit.name, sums.busy_us, model))
    return costs, models


def costs_of(engine_audits: Sequence[EngineAudit], gpu_hour: float | None = None) -> CostReport:
    """The costs of all engines together as data."""
    return cost_report(*gathered(engine_audits), gpu_hour)


def cost_report(
    costs: Costs,
    models: Sequence[ModelRow],
    gpu_hour: float | None = None,
    first_tokens: Mapping[str, FirstToken] | None = None,
) -> CostReport:
    """Costs as data. ``gpu_hour``: the price of an hour of one engine. ``first_tokens``: the delays by kind
    and cause, for costs that hold none themselves."""
    engine_seconds = costs.busy_us / 1e6
    if first_tokens is None:
        first_tokens = {key: spread(lost.delays) for key, lost in costs.lost.items()}
    rows = [
        _row(key, lost, engine_seconds, gpu_hour, first_tokens.get(key, FirstToken()))
        for key, lost in costs.lost.items()
    ]
    lost_seconds = costs.lost_seconds
    return CostReport(
        engine_seconds=engine_seconds,
        lost_seconds=lost_seconds,
        lost_share=part(lost_seconds, engine_seconds),
        money=money(lost_seconds, gpu_hour),
        rows=sorted(rows, key=lambda row: (-(row.seconds or 0.0), -row.tokens, row.kind, row.cause)),
        loads=[
            made(LoadRow, loads, connector=connector, asynchronous_loads=loads.loads)
            for connector, loads in sorted(costs.loads.items())
        ],
        models=list(models),
    )


def _row(
    key: str, lost: LostWork, engine_seconds: float, gpu_hour: float | None, first_token: FirstToken
) -> CostRow:
    kind, _, cause = key.partition("/")
    return made(
        CostRow,
        lost,
        kind=kind,
        cause=cause,
        text=lost_text(kind, cause),
        share=part(lost.seconds, engine_seconds),
        first_token_requests=first_token.requests,
        first_token_median_seconds=first_token.median_seconds,
        first_token_p95_seconds=first_token.p95_seconds,
        money=money(lost.seconds, gpu_hour),
    )


def lost_text(kind: str, cause: str = "") -> str:
    """Words for one kind of lost work."""
    if kind == REWORK:
        return f"rework: {loss(cause)}"
    return {REJECTED: "rejected drafts", OVERRUN: "overrun past the stop"}[kind]


def part(seconds: float | None, engine_seconds: float) -> float | None:
    """A part of engine time, 1 for all of it; None if it is not known."""
    return None if seconds is None or not engine_seconds else seconds / engine_seconds


def money(seconds: float | None, gpu_hour: float | None) -> float | None:
    """The price of some seconds of engine time; None if it is not known."""
    return None if seconds is None or gpu_hour is None else seconds / 3600 * gpu_hour


def spread(delays: PricedDelays) -> FirstToken:
    """Median and 95th percentile of the delays of the first token."""
    return FirstToken(delays.requests, delays.quantile(0.5), delays.quantile(0.95))


# --- the answer -----------------------------------------------------------------------------------------


def parts(report: CostReport) -> list[Part]:
    """What lost work cost, the loads, and the model; nothing where no step was timed."""
    if not report.engine_seconds:
        return []
    columns = (
        "=text | tokens | requests | seconds:s | engine time=share:% | "
        "first token, median=first_token_median_seconds:s | p95=first_token_p95_seconds:s"
    )
    if report.money is not None or any(row.money is not None for row in report.rows):
        columns += " | cost=money:,.2f"
    lost = Table(report.rows, columns, "What lost work cost", LEGEND)
    return [
        lost if report.rows else Lines(["No work was lost."], lost.title),
        Table(
            report.loads,
            "connector | asynchronous loads | waited=waited_seconds:s | in vain=vain_seconds:s | "
            "saved by them=asynchronous_saved_seconds:s | saved by all loads=saved_seconds:s | "
            "not saved=not_saved_seconds:s",
            "External loads: seconds waited and saved",
        ),
        Lines([Words(line, DIM) for line in model_lines(report)]),
    ]


def model_lines(report: CostReport) -> Iterator[str]:
    """Engine time and the model of each engine, a sentence each."""
    shown = report.models[:3]
    for row in shown:
        name = f"{row.engine}: " if len(report.models) > 1 else ""
        yield f"{name}{row.engine_seconds:,.1f} s of engine time. {model_text(row.model)}"
    if len(report.models) > len(shown):
        yield f"{counted(len(report.models) - len(shown), 'more engine')}: --format json."


def model_text(model: StepModel) -> str:
    """The model's figures and its error in a sentence, or why it was refused."""
    if model.refused:
        return f"Seconds are unknown: {model.refused}."
    prices = [
        f"{decimal(1e3 * coefficient.seconds, 3)} ms a {_UNITS[name]}"
        for name, coefficient in model.coefficients.items()
        if coefficient.seconds is not None and name in _UNITS
    ]
    milliseconds = decimal(1e3 * (model.absolute_error_seconds or 0), 2)
    error = (
        f"median error {percent(model.relative_error or 0)} ({milliseconds} ms) on held-out steps, "
        f"R² {model.r2 or 0:.3f}, {counted(model.observations, 'observation')}"
    )
    return f"Model: {', '.join(prices)}; {error}."


_UNITS = {
    "constant": "step",
    "prefill_tokens": "prefill token",
    "decode_requests": "decoding request",
    "draft_tokens": "draft token",
}


class FirstTokens(msgspec.Struct, frozen=True):
    """Of one request or several: ``microseconds`` by cause, summed over all ``requests`` with an output."""

    microseconds: Mapping[str, int]
    requests: int = 1

    @classmethod
    def of(cls, figures: Mapping[str, int]) -> FirstTokens:
        """Those of sums of figures, by the figure's name."""
        return cls(
            {cause: figures[f"{cause}_microseconds"] for cause in FIRST_TOKEN}, figures["first_tokens"]
        )

    def means(self) -> list[tuple[str, float]]:
        """Cause and mean milliseconds, longest first; causes without any are left out."""
        return _means(self.microseconds, self.requests)

    def sentence(self) -> str:
        """``Time to first token: 34.5 ms, 20.0 ms queued and 14.5 ms prefill.``"""
        many = f" of {counted(self.requests, 'request')}, mean" if self.requests > 1 else ""
        return f"Time to first token{many}: {_total_and_parts(self.means())}"


def queued_sentence(microseconds: Mapping[str, int], requests: int = 1) -> str:
    """``Queued: 20.0 ms, 15.0 ms budget and 5.0 ms next step.``

    ``microseconds``: by cause of :data:`~kvledger.audit.causes.QUEUE`.
    """
    prefix = f"{QUEUED}_"
    by_cause = {cause.removeprefix(prefix): spent for cause, spent in microseconds.items()}
    return f"Queued{', mean' if requests > 1 else ''}: {_total_and_parts(_means(by_cause, requests))}"


def later_tokens_sentence(microseconds: Mapping[str, int], tokens: int) -> str:
    """``Time per output token of 120 tokens: 12.1 ms, 11.0 ms decode and 1.1 ms decode again.``

    ``tokens``: the output tokens after the first of each request.
    """
    by_cause = _total_and_parts(_means(microseconds, tokens))
    return f"Time per output token of {counted(tokens, 'token')}: {by_cause}"


def _means(microseconds: Mapping[str, int], number: int) -> list[tuple[str, float]]:
    """Cause and mean milliseconds, longest first; causes without any are left out."""
    spent = sorted(microseconds.items(), key=lambda item: -item[1])
    return [(cause.replace("_", " "), us / number / 1e3) for cause, us in spent if us and number]


def _total_and_parts(means: list[tuple[str, float]]) -> str:
    """``34.5 ms, 20.0 ms queued and 14.5 ms prefill.``"""
    total = shown(sum(spent for _, spent in means))
    parts = [f"{shown(spent)} {cause}" for cause, spent in means]
    return total + (f", {listed(parts)}." if parts else ".")
