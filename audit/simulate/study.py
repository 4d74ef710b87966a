"""One journal's traffic on several releases and configurations, beside the recording.

The study begins with two calibrations of the recorded configuration on its own release. *By step* the
recording must come out to the token: then contents, settings and the scheduler are right. *By time* the rest
is shown: what the model of step time and the arrivals between two steps leave open.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from .. import events as ev
from .. import temporary
from ..analysis.step_model import NO_STEPS, StepModel, fitted_with
from ..analysis.step_times import StepSample
from ..engines.configuration import SCHEDULER
from ..errors import LedgerError
from ..events import Setting
from ..figures.totals import Totals
from ..traffic.reader import Traffic, TrafficReader
from .processes import Away, Job, Simulators, each_done, run_away, same_release, shares
from .rows import FEATURES, Counting, Difference, Run, differences

# --- Which settings a simulated scheduler has: those of the journal, and those that the user sets
# instead.

NAMES = {
    "num_gpu_blocks": "blocks",
    "block_size": "block_size",
    "max_num_seqs": "max_running",
    "max_num_batched_tokens": "max_batched_tokens",
    "max_model_len": "max_model_len",
    "scheduling_policy": "policy",
    "async_scheduling": "asynchronous",
    "enable_prefix_caching": "prefix_caching",
    "max_loras": "loras",
    "prefix_cache_retention_interval": "prefix_cache_retention_interval",
}
"""Settings by vLLM's name: what the journal calls them."""

NEUTRAL: dict[str, Setting] = {
    "watermark": 0.0,
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "max_num_scheduled_tokens": None,
    "max_num_active_seqs": None,
    "disable_chunked_mm_input": False,
    "prefill_schedule_interval": 1,
}
"""Values with which a setting does nothing: a release without the setting acts as if it had them."""


class Variant(msgspec.Struct, frozen=True):
    """A configuration to simulate: a release ("" for the recorded one), and settings by vLLM's names."""

    release: str = ""
    settings: tuple[tuple[str, Setting], ...] = ()

    @property
    def name(self) -> str:
        """``max_num_batched_tokens=4096`` or ``0.24.0``; "recorded" without a change."""
        words = [self.release, *(f"{name}={value}" for name, value in self.settings)]
        return " ".join(filter(None, words)) or "recorded"


def parsed(word: str) -> tuple[str, Setting]:
    """A setting from ``NAME=VALUE``. Raises LedgerError."""
    name, equals, text = word.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    if not equals or not text:
        raise LedgerError(f"{word!r} is no setting, such as num_gpu_blocks=20000")
    if name not in NAMES and name not in SCHEDULER:
        raise LedgerError(
            f"{name!r} is no setting that can be simulated; these can: {', '.join([*NAMES, *SCHEDULER])}"
        )
    return name, value(text)


def value(text: str) -> Setting:
    """A number, a truth value, None or a word."""
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered == "none":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def not_recorded(configuration: Mapping[str, Setting], given: Sequence[str]) -> list[str]:
    """Settings that the journal does not have although its release may read them."""
    if "disable_chunked_mm_input" in configuration:  # which every release has
        return []
    return [name for name in SCHEDULER if name not in given and name not in NEUTRAL]


def setup(traffic: Traffic, changes: Mapping[str, Setting]) -> dict[str, Any]:
    """The arguments of EngineSetup for some traffic, with what was set instead of what was recorded.

    Raises LedgerError.
    """
    groups, group_tokens = traffic.groups, traffic.group_tokens
    recorded = dict(traffic.configuration)
    recorded |= {NAMES[name]: given for name, given in changes.items() if name in NAMES}
    options = {name: recorded[name] for name in SCHEDULER if name in recorded}
    options |= {name: given for name, given in changes.items() if name in SCHEDULER}
    arguments: dict[str, Any] = {
        name: recorded[name]
        for name in (*NAMES.values(), "drafts", "load_failure_policy", "kv_role", "drafter")
        if recorded.get(name) is not None
    }
    if arguments.get("drafter") not in ("eagle", "ngram"):
        arguments.pop("drafter", None)
    if recorded.get("connector") is not None:
        arguments["connector"] = "recorded"
    if len(set(group_tokens)) > 1:
        if "block_size" in changes:
            sizes = ", ".join(map(str, group_tokens))
            raise LedgerError(f"block_size can't be set: the KV cache groups have blocks of {sizes} tokens")
        arguments |= {"group_tokens": list(group_tokens), "block_size": min(group_tokens)}
    if groups != ["full"]:
        arguments["groups"] = list(groups)
        arguments["sliding_window"] = recorded.get("sliding_window") or 64
    reserve = options.pop("scheduler_reserve_full_isl", True)
    chunked = options.pop("enable_chunked_prefill", True)
    if options.get("prefill_schedule_interval", 1) == 1:
        options.pop("prefill_schedule_interval", None)
    return arguments | {
        "reserve_full_isl": bool(reserve),
        "chunked_prefill": bool(chunked),
        "pooling": all(request.pooling for request in traffic.requests),
        "scheduler_options": tuple(sorted(options.items())),
        "log_stats": bool(recorded.get("log_stats", True)),
    }


SHOWN = 12
"""Differing figures that a calibration keeps."""

TAKEN = 4096
"""Events that are counted at a time."""

TRUSTED_POINTS = 1.0
"""The largest difference of hits by time, in percentage points, at which other configurations are trusted."""

RECORDED = "recorded"
BY_TIME = "simulated as recorded"


class Outcome(msgspec.Struct, kw_only=True):
    """What one configuration led to, recorded or simulated. Seconds are None where no model of step time
    holds.

    ``hit_share``: local hits as a share of prompt tokens. ``load``: the share of the time in which a step
    ran. ``saturated``: more and more requests waited, so waiting times depend on how long the traffic lasts.
    ``totals``: the sums of all figures.
    """

    name: str
    release: str
    requests: int
    prompt_tokens: int
    hit_share: float
    external_share: float
    rework_tokens: int
    preemptions: int
    steps: int
    seconds: float | None
    engine_seconds: float | None
    load: float | None
    queued_p50: float | None
    queued_p95: float | None
    first_token_p50: float | None
    first_token_p95: float | None
    token_p50: float | None
    token_p95: float | None
    saturated: bool
    totals: Totals
    error: str = ""


GOALS = (
    "hit_share",
    "external_share",
    "rework_tokens",
    "preemptions",
    "engine_seconds",
    "load",
    "queued_p50",
    "queued_p95",
    "first_token_p50",
    "first_token_p95",
    "token_p50",
    "token_p95",
)
"""The figures of an outcome that a goal may name. Times are seconds."""


class Calibration(msgspec.Struct, kw_only=True):
    """How the recorded configuration came out on its own release.

    ``differing``: requests with any different figure, of ``requests``; ``differences``: the first of them.
    ``exact``: none, and as many steps. ``by_time_points``: how far the hits by time are from the recording.
    ``doubts``: why other configurations are not trusted, one sentence each.
    """

    release: str
    requests: int
    differing: int
    steps: int
    simulated_steps: int
    differences: list[Difference]
    names: dict[int, str]
    exact: bool
    by_time_points: float | None
    differing_by_time: int | None
    doubts: list[str]

    @property
    def trusted(self) -> bool:
        """Whether the other configurations can be believed."""
        return not self.doubts


SIGNS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


class Goal(msgspec.Struct, frozen=True):
    """``hit_share >= 0.45``."""

    figure: str
    sign: str
    bound: float

    def met(self, outcome: Outcome) -> bool:
        """Whether an outcome meets it. A figure that is not known does not, nor does a run that ended
        early."""
        found = getattr(outcome, self.figure)
        if found is None or outcome.error:
            return False
        return bool(SIGNS[self.sign](found, self.bound))


def goal(text: str) -> Goal:
    """A goal from text. Raises LedgerError."""
    matched = re.fullmatch(r"\s*(\w+)\s*(>=|<=|<|>)\s*([0-9.eE+-]+)\s*(%?)\s*", text)
    try:
        bound = float(matched[3]) / (100 if matched[4] else 1) if matched else 0.0
    except ValueError:
        matched = None
    if matched is None or matched[1] not in GOALS:
        raise LedgerError(f'{text!r} is no goal, such as "hit_share >= 0.45"; figures: {", ".join(GOALS)}')
    return Goal(matched[1], matched[2], bound)


Stage = Callable[[str, float], object]
"""Called with what is going on and how far it is, 0 to 1."""


class Source(NamedTuple):
    """What a study simulates. ``recorded``: what was recorded of it; None: it is no recording.

    ``since``: from when on requests are counted, in microseconds since the engine started. ``steps``: the
    timed steps to which the model of step time is fitted.
    """

    traffic: Traffic
    recorded: Run | None
    steps: StepSample
    since: int = 0


def recording(
    events: Iterable[ev.Event], *, since: float | None = None, until: float | None = None
) -> Source:
    """The traffic of one engine's events, and what was recorded of it.

    ``since`` and ``until``: Unix seconds; requests that came from then on, or before, are counted, and what
    came before is simulated too. Raises LedgerError.
    """
    reader, counting, batch = TrafficReader(), None, list[ev.Event]()
    first, last = 0, 1 << 62
    for event in events:
        if counting is None and isinstance(event, ev.EngineStarted):
            began = event.began_seconds
            first = 0 if since is None else max(0, round((since - began) * 1e6))
            last = 1 << 62 if until is None else round((until - began) * 1e6)
            counting = Counting(since=first, until=last)
        if event.at >= last:
            break
        reader.feed(event)
        batch.append(event)
        if counting is not None and len(batch) >= TAKEN:
            counting.feed(batch)
            batch = []
    traffic = reader.traffic()
    assert counting is not None
    counting.feed(batch)
    recorded = counting.run()
    if not recorded.rows:
        raise LedgerError("no request of the journal is in this window")
    return Source(traffic, recorded, recorded.sample, first)


class Study:
    """The simulations of one engine's traffic. Use it as a context manager."""

    def __init__(
        self,
        source: Source,
        *,
        commands: Callable[[str], Sequence[str]],
        workers: int = 1,
        rate: float = 1.0,
        closed: bool = False,
        stage: Stage | None = None,
        shared: dict[tuple[str, ...], Simulators] | None = None,
        away: Any = None,
    ) -> None:
        """``commands``: what stands in front of the options of a release's interpreter ("": the traffic's).
        ``shared``: processes that several studies use; the caller stops them. ``away``: a
        :class:`~..replay.parallel.Run` that simulates configurations on other machines."""
        self._commands, self._workers = commands, workers
        """The interpreter of a release, and how many simulations run at a time."""
        self._rate, self._closed = rate, closed
        """How much faster requests come, and whether clients wait for answers."""
        self._away = away
        """Runs simulations of configurations elsewhere; None: they run here."""
        self._stage: Stage = stage or (lambda words, share: None)
        self._folder = temporary.folder("kvledger-simulate-")
        """Has the traffic, and what each simulation led to."""
        self._simulators: dict[tuple[str, ...], Simulators] = {} if shared is None else shared
        self._owned = shared is None
        """Whether they end with the study."""
        self._jobs = 0
        self._traffic_file = Path(self._folder.name, "traffic")
        self._traffic_file.write_bytes(msgspec.msgpack.encode(source.traffic))
        self.traffic = source.traffic
        """What is simulated, without its script, which is large."""
        self.traffic.script = []
        self.source = source
        """Where it comes from."""
        self.model, self.betas = self._fit()
        """The model of step time, and the microseconds of each of its features."""

    def __enter__(self) -> Study:
        return self

    def __exit__(self, *_: object) -> None:
        if self._owned:
            for simulators in self._simulators.values():
                simulators.stop()
        self._folder.cleanup()

    @property
    def recorded(self) -> Run:
        """What was recorded. Raises LedgerError if the traffic is no recording."""
        if self.source.recorded is None:
            raise LedgerError("a request trace says nothing of what an engine did with it")
        return self.source.recorded

    def _fit(self) -> tuple[StepModel, list[float]]:
        recorded = self.source.recorded
        if recorded is None and not self.source.steps.rows:
            return NO_STEPS, [1.0, *[0.0] * (len(FEATURES) - 1)]
        model, betas = fitted_with(self.source.steps, FEATURES)
        if not betas:
            mean = recorded.busy_us / max(1, recorded.steps) if recorded is not None else 0.0
            return (model or NO_STEPS), [max(1.0, mean), *[0.0] * (len(FEATURES) - 1)]
        return model, list(betas)

    @property
    def timed(self) -> bool:
        """Whether seconds can be told."""
        return not self.model.refused

    # --- simulations ----------------------------------------------------------------------------------

    def _on(self, release: str) -> Simulators:
        command = tuple(self._commands(release or self.traffic.version))
        found = self._simulators.get(command)
        if found is None:
            self._stage(f"starting vLLM {release or self.traffic.version}", 0.0)
            found = self._simulators[command] = Simulators(command, self._workers)
            found.start()
        return found

    def end(self, release: str) -> None:
        """End the processes of a release, which take memory."""
        found = self._simulators.pop(tuple(self._commands(release)), None)
        if found is not None:
            found.stop()

    def _job(
        self,
        variant: Variant,
        *,
        by_step: bool = False,
        rate: float | None = None,
        betas: list[float] | None = None,
    ) -> Job:
        self._jobs += 1
        folder = Path(self._folder.name)
        return Job(
            traffic=str(self._traffic_file),
            result=str(folder / f"result-{self._jobs}"),
            progress=str(folder / f"progress-{self._jobs}"),
            setup=setup(self.traffic, dict(variant.settings)),
            betas=None if by_step else (betas or self.betas),
            rate=1.0 if by_step else (self._rate if rate is None else rate),
            closed=self._closed,
            since=self.source.since,
        )

    def _runs(
        self, jobs: list[tuple[Any, Simulators, Job]], words: str
    ) -> Iterator[tuple[Any, Run | LedgerError]]:
        files = [Path(job.progress) for _, _, job in jobs]

        def look() -> None:
            self._stage(words, sum(shares(files)) / len(files))

        yield from each_done(jobs, self._workers, look)

    def calibrate(self, assumed: Sequence[tuple[str, ev.Setting]] = ()) -> tuple[Calibration, Outcome | None]:
        """Both calibrations; the outcome by time beside the recording.

        ``assumed``: settings by name, of which those are taken that the journal does not have.
        """
        own = self._on("")
        recorded_settings = self.traffic.configuration
        same = Variant(
            "", tuple(each for each in assumed if NAMES.get(each[0], each[0]) not in recorded_settings)
        )
        jobs: list[tuple[Any, Simulators, Job]] = [
            ("step", own, self._job(same, by_step=True)),
            ("time", own, self._job(same, rate=1.0)),
        ]
        runs = dict(self._runs(jobs, "calibrating"))
        by_step, by_time = runs["step"], runs["time"]
        found = differences(self.recorded, by_step) if isinstance(by_step, Run) else []
        differing = len({each.request for each in found})
        steps = by_step.steps if isinstance(by_step, Run) else 0
        error = by_step.error if isinstance(by_step, Run) else str(by_step)
        outcome = self.outcome(BY_TIME, own.version, by_time) if isinstance(by_time, Run) else None
        recorded = self.outcome(RECORDED, self.traffic.version, self.recorded)
        points = None if outcome is None else 100 * (outcome.hit_share - recorded.hit_share)
        doubts = list(self._doubts(own.version, found, differing, steps, error, points))
        missing = not_recorded(recorded_settings, [name for name, _ in same.settings])
        if missing:
            doubts.append(
                f"The journal does not have {', '.join(missing)}: vLLM's defaults are "
                "assumed. Set them with --set."
            )
        numbers = {each.request for each in found[:SHOWN]}
        calibration = Calibration(
            release=own.version,
            requests=len(self.recorded.rows),
            differing=differing,
            steps=self.recorded.steps,
            simulated_steps=steps,
            differences=found[:SHOWN],
            names={each.number: each.request_id for each in self.traffic.requests if each.number in numbers},
            exact=not found and not error and (steps == self.recorded.steps or bool(self.source.since)),
            by_time_points=points,
            differing_by_time=(
                len({each.request for each in differences(self.recorded, by_time)})
                if isinstance(by_time, Run)
                else None
            ),
            doubts=doubts,
        )
        return calibration, outcome

    def _doubts(
        self,
        release: str,
        found: list[Difference],
        differing: int,
        steps: int,
        error: str,
        points: float | None,
    ) -> Iterator[str]:
        if not same_release(release, self.traffic.version):
            yield (
                f"The journal is of vLLM {self.traffic.version}, and {release} is "
                "calibrated: give the interpreter "
                "of an environment that has it with --python."
            )
        if error:
            yield f"By step the scheduler raised {error}."
        elif found:
            yield (
                f"By step {differing:,} of {len(self.recorded.rows):,} requests differ from "
                "the recording, the "
                f"first in {found[0].figure}."
            )
        elif steps != self.recorded.steps and not self.source.since:
            yield f"By step there are {steps:,} steps in place of {self.recorded.steps:,}."
        if points is None:
            yield "The recorded configuration can't be simulated by time."
        elif abs(points) > TRUSTED_POINTS and not self._closed:
            yield f"By time the hits are {points:+.1f} points from the recording."
        yield from self.traffic.doubts

    def variants(self, variants: Sequence[Variant], *, betas: list[float] | None = None) -> Iterator[Outcome]:
        """Simulate each by time, as they end. ``betas``: step times of another recording."""
        for _, outcome in self.simulated(variants, betas=betas):
            yield outcome

    def simulated(
        self, variants: Sequence[Variant], *, betas: list[float] | None = None
    ) -> Iterator[tuple[Variant, Outcome]]:
        """The same, each with its variant."""
        if self._away is not None:
            yield from self._simulated_away(variants, betas)
            return
        jobs = [(variant, self._on(variant.release), self._job(variant, betas=betas)) for variant in variants]
        on = {variant: simulators.version for variant, simulators, _ in jobs}
        words = "simulating 1 configuration" if len(jobs) == 1 else f"simulating {len(jobs)} configurations"
        for variant, run in self._runs(jobs, words):
            yield variant, self._outcome_of(variant, on[variant], run)

    def _simulated_away(
        self, variants: Sequence[Variant], betas: list[float] | None
    ) -> Iterator[tuple[Variant, Outcome]]:
        orders = []
        for variant in variants:
            command = tuple(self._commands(variant.release or self.traffic.version))
            here = command == (sys.executable,)
            orders.append(Away(() if here else command, self._job(variant, betas=betas)))
        work = partial(run_away, traffic=self._traffic_file.read_bytes())
        for variant, (version, run) in zip(variants, self._away(work, orders), strict=True):
            found = LedgerError(run) if isinstance(run, str) else msgspec.msgpack.decode(run, type=Run)
            yield variant, self._outcome_of(variant, version or variant.release, found)

    def _outcome_of(self, variant: Variant, release: str, run: Run | LedgerError) -> Outcome:
        if isinstance(run, LedgerError):
            empty = Run(Totals(), 0, 0, self.source.steps, [], error=str(run))
            return self.outcome(variant.name, release, empty)
        return self.outcome(variant.name, release, run)

    def find(self, name: str, wanted: Goal, base: Variant) -> Iterator[tuple[int, Outcome]]:
        """Try values of a setting, ending with the smallest that meets a goal. It assumes that if a value
        meets the goal, larger ones do."""
        key = NAMES.get(name, name)
        recorded = self.traffic.configuration.get(key)
        if not isinstance(recorded, int) or isinstance(recorded, bool) or recorded < 1:
            raise LedgerError(f"{name} has no recorded number to begin with")
        tried: dict[int, Outcome] = {}

        def meets(value: int) -> Iterator[tuple[int, Outcome]]:
            changed = {**dict(base.settings), name: value}
            variant = Variant(base.release, tuple(changed.items()))
            [tried[value]] = self.variants([variant])
            yield value, tried[value]

        value, low, high = recorded, 0, 0
        yield from meets(value)
        grows = not wanted.met(tried[value])
        for _ in range(8):
            met = wanted.met(tried[value])
            low, high = (low, value) if met else (value, high)
            if met == grows or (value == 1 and not grows):
                break
            value = value * 2 if grows else max(1, value // 2)
            yield from meets(value)
        while high and high - low > max(1, high // 100):
            value = (low + high) // 2
            yield from meets(value)
            low, high = (low, value) if wanted.met(tried[value]) else (value, high)

    # --- outcomes -------------------------------------------------------------------------------------

    def outcome(self, name: str, release: str, run: Run) -> Outcome:
        """What a run led to."""
        totals, timed = run.totals, self.timed or run is self.source.recorded
        prompt = totals.prompt_tokens
        seconds = (run.idle_at - run.began_at) / 1e6
        first = sorted(row.first_token_us for row in run.rows if row.first_token_us >= 0)
        queued = sorted(row.queued_us for row in run.rows if row.queued_us >= 0)
        later = sorted(
            row.output_us / row.later_tokens for row in run.rows if row.later_tokens > 0 <= row.output_us
        )
        known = timed and bool(run.rows)
        return Outcome(
            name=name,
            release=release,
            requests=len(run.rows),
            prompt_tokens=prompt,
            hit_share=totals.local / prompt if prompt else 0.0,
            external_share=totals.external / prompt if prompt else 0.0,
            rework_tokens=totals.of("rework"),
            preemptions=totals.preemptions,
            steps=run.steps,
            seconds=seconds if known else None,
            engine_seconds=run.busy_us / 1e6 if known else None,
            load=run.busy_us / 1e6 / seconds if known and seconds > 0 else None,
            queued_p50=_seconds(queued, 0.5, known),
            queued_p95=_seconds(queued, 0.95, known),
            first_token_p50=_seconds(first, 0.5, known),
            first_token_p95=_seconds(first, 0.95, known),
            token_p50=_seconds(later, 0.5, known),
            token_p95=_seconds(later, 0.95, known),
            saturated=_saturated(run.waiting),
            totals=totals,
            error=run.error,
        )


def _seconds(ordered: Sequence[float], share: float, known: bool) -> float | None:
    """A percentile in seconds; None: not known."""
    if not ordered or not known:
        return None
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / 1e6


def _saturated(waiting: Sequence[int]) -> bool:
    """Whether more and more requests wait: the second half of the arrivals finds a longer queue."""
    if len(waiting) < 8:
        return False
    half = len(waiting) // 2
    before, after = (
        sum(waiting[half // 2 : half]) / (half - half // 2),
        sum(waiting[-half // 2 :]) / max(1, half // 2),
    )
    return after > 2 * before + 4
