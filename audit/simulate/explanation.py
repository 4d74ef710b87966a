"""Why two recordings differ: the way from one to the other, one change at a time.

Each row of the way is a simulation that has one change more than the row before: first the release, then each
setting, then the traffic, then how long steps take. So the differences of all rows sum to the whole. What a
simulation does wrong is a row of its own at both ends, the *residual*.

What a change does depends on what was changed before it. The order is fixed:

1. settings that the later release does not have, to the value with which they do nothing;
2. the release, where a setting that only the later one has keeps that value. Releases between the two narrow
   down where the figures change;
3. each other setting: first those that turn on a rule that only the later release has, then the others, in
   the order of :data:`ORDER`;
4. the traffic, with all that can't be changed apart from it (:data:`TOGETHER`);
5. how long steps take: the model of step time of the other recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from ..engines.configuration import SCHEDULER
from ..errors import LedgerError
from ..events import Setting
from ..faults.catalogue import ReleaseRule, begun, by_switch
from ..faults.conditions import unmet
from ..traffic.reader import Traffic
from .processes import same_release
from .study import NAMES, NEUTRAL, RECORDED, Calibration, Outcome, Study, Variant

ORDER = (*NAMES, *SCHEDULER)
"""Settings in the order in which they are changed, by vLLM's names."""

TOGETHER = ("drafts", "drafter", "connector", "kv_role", "load_failure_policy", "sliding_window")
"""Settings that are changed with the traffic: what drafts and a connector answered is recorded with the
requests."""

DEFAULTS: dict[str, Setting] = {"enable_chunked_prefill": True}
"""vLLM's defaults of settings that a journal may lack."""

Kind = Literal["recorded", "residual", "release", "rule", "setting", "traffic", "step times"]


Found = tuple[Kind, str, Outcome | None, list[ReleaseRule]]
"""A row before its change is known: kind, what was changed, the outcome (None: it is missing), rules."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A row less the row before it. Shares are of prompt tokens."""

    hit_share: float
    external_share: float
    rework_tokens: int
    preemptions: int

    def __bool__(self) -> bool:
        return any(msgspec.structs.astuple(self))


def change(before: Outcome, after: Outcome) -> Change:
    """How two rows differ."""
    return Change(
        hit_share=after.hit_share - before.hit_share,
        external_share=after.external_share - before.external_share,
        rework_tokens=after.rework_tokens - before.rework_tokens,
        preemptions=after.preemptions - before.preemptions,
    )


class Row(msgspec.Struct, kw_only=True):
    """One row. ``changed``: what was changed since the row before. ``change``: None in the first row.

    ``rules``: of a kind ``release`` the rules that begin or end between its two releases, which may be the
    reason; of a kind ``rule`` the one that the setting turns on or off.
    """

    kind: Kind
    changed: str
    outcome: Outcome
    change: Change | None
    rules: list[str] = []


class Explanation(msgspec.Struct, kw_only=True):
    """The way from one recording to the other.

    ``traffic_first``: AFTER's traffic with BEFORE's release, settings and step times, for the other order.
    ``refused``: why a model of step time was refused, one sentence each. ``missing``: releases in between
    that could not be simulated. ``interrupted``: by Ctrl-C, so rows are missing.
    """

    before: Calibration
    after: Calibration
    rows: list[Row]
    traffic_first: Outcome | None = None
    refused: list[str] = []
    missing: list[str] = []
    interrupted: bool = False

    @property
    def doubts(self) -> list[str]:
        """Why it is not trusted, one sentence each."""
        sides = (("before", self.before), ("after", self.after))
        found = [f"{name}: {doubt}" for name, side in sides for doubt in side.doubts]
        return found + [
            f"{row.changed} ended early: {row.outcome.error}" for row in self.rows if row.outcome.error
        ]

    @property
    def code(self) -> int:
        """0; 3: the explanation does not trust itself, or was interrupted."""
        return 3 if self.doubts or self.interrupted else 0


class SettingChange(msgspec.Struct, frozen=True):
    """A setting that the two recordings have differently, by vLLM's name."""

    name: str
    before: Setting
    after: Setting

    @property
    def words(self) -> str:
        """``num_gpu_blocks 40 -> 20``."""
        return f"{self.name} {self.before} -> {self.after}"


class Way(msgspec.Struct, frozen=True):
    """What is changed, in order: ``first`` on the release before, ``then`` on the release after.

    ``held``: settings during the change of the release. ``together``: what is changed with the traffic.
    """

    first: list[SettingChange]
    then: list[SettingChange]
    held: tuple[tuple[str, Setting], ...]
    together: list[SettingChange]


def way(before: Traffic, after: Traffic) -> Way:
    """The changes from one recording's settings to the other's."""
    differing = []
    for name in ORDER:
        one, other = effective(before, name), effective(after, name)
        if one != other and not all(_without_effect(each, name) for each in (before, after)):
            differing.append(SettingChange(name, one, other))
    first = [each for each in differing if NAMES.get(each.name, each.name) not in after.configuration]
    then = [each for each in differing if each not in first]
    then.sort(key=lambda each: _rule_of_one(before, after, each.name) is None)  # the rest keeps its order
    held = [(each.name, each.after) for each in first]
    held += [
        (each.name, each.before)
        for each in then
        if NAMES.get(each.name, each.name) not in before.configuration or _acts_only_after(before, each.name)
    ]
    return Way(first, then, tuple(held), list(_together(before, after)))


def _without_effect(traffic: Traffic, name: str) -> bool:
    """Whether the settings of an engine rule out the rule that a setting turns on or off."""
    rule = by_switch().get(name)
    return rule is not None and unmet(rule.conditions, traffic.configuration) is None


def _rule_of_one(before: Traffic, after: Traffic, name: str) -> ReleaseRule | None:
    """The rule that one of the two releases has, and that the setting turns on or off."""
    rule = by_switch().get(name)
    if rule is None or rule.holds_in(before.version) == rule.holds_in(after.version):
        return None
    return rule


def _acts_only_after(traffic: Traffic, name: str) -> bool:
    """Whether a setting is recorded although the release has no such rule: it acts as if it were off."""
    rule = by_switch().get(name)
    return rule is not None and not rule.holds_in(traffic.version)


def effective(traffic: Traffic, name: str) -> Setting:
    """The value that a setting has, or as which the release acts if it does not have the setting."""
    key = NAMES.get(name, name)
    if key in traffic.configuration:
        return traffic.configuration[key]
    rule = by_switch().get(name)
    if rule is not None and rule.switch is not None:
        return rule.switch.default if rule.holds_in(traffic.version) else rule.switch.off
    return NEUTRAL.get(name, DEFAULTS.get(name))


def _together(before: Traffic, after: Traffic) -> Iterator[SettingChange]:
    for name in TOGETHER:
        one, other = before.configuration.get(name), after.configuration.get(name)
        if one != other:
            yield SettingChange(name, one, other)
    if before.groups != after.groups:
        yield SettingChange("groups", "+".join(before.groups), "+".join(after.groups))


class Explainer:
    """Simulates the way between two recordings. ``between``: releases that may be simulated to narrow down
    where figures change, from that of ``before`` to that of ``after``."""

    def __init__(self, before: Study, after: Study, between: Sequence[str]) -> None:
        self._before, self._after = before, after
        self._between = list(between)
        self._way = way(before.traffic, after.traffic)
        self._done: dict[Variant, Outcome] = {}
        """What each configuration of BEFORE's traffic led to."""
        self._missing: list[str] = []
        """Releases that could not be simulated."""
        self._steps: list[tuple[str, str]] = []

    def explain(self) -> Explanation:
        """Every row. Raises LedgerError if one of the two can't be simulated at all."""
        before, after = self._before, self._after
        calibrated, simulated = before.calibrate()
        calibrated_after, simulated_after = after.calibrate()
        for name, side, outcome in (
            ("BEFORE", calibrated, simulated),
            ("AFTER", calibrated_after, simulated_after),
        ):
            if outcome is None:
                raise LedgerError(f"{name} can't be simulated: {' '.join(side.doubts)}")
        assert simulated is not None
        assert simulated_after is not None
        result = Explanation(
            before=calibrated,
            after=calibrated_after,
            rows=[],
            refused=[
                f"{name}: {study.model.refused}"
                for name, study in (("before", before), ("after", after))
                if study.model.refused
            ],
            missing=self._missing,
        )
        last: list[Outcome] = []
        try:
            self._simulate([variant for _, variant, _ in self._configurations()])
            self._narrow(simulated)
            unchanged = Variant(before.traffic.version, self._settings(before))
            last += after.variants([Variant()], betas=before.betas)
            [result.traffic_first] = after.variants([unchanged], betas=before.betas)
        except KeyboardInterrupt:
            result.interrupted = True
        result.rows += self._rows(simulated, last, simulated_after)
        return result

    # --- simulations ----------------------------------------------------------------------------------

    def _settings(self, study: Study) -> tuple[tuple[str, Setting], ...]:
        """The settings that differ, as one of the two recordings has them."""
        changes = (*self._way.first, *self._way.then)
        return tuple((each.name, each.before if study is self._before else each.after) for each in changes)

    @property
    def _upgrade(self) -> tuple[str, str] | None:
        """The two releases; None if they are one."""
        versions = self._before.traffic.version, self._after.traffic.version
        return None if same_release(*versions) else versions

    def _configurations(self) -> Iterator[tuple[Kind, Variant, SettingChange | None]]:
        """Each configuration of BEFORE's traffic, in order, with the setting that it changes."""
        state: dict[str, Setting] = {}
        for each in self._way.first:
            state[each.name] = each.after
            yield self._kind(each), Variant("", tuple(state.items())), each
        release = ""
        if self._upgrade is not None:
            release = self._upgrade[1]
            state = dict(self._way.held)
            yield "release", Variant(release, tuple(state.items())), None
        for each in self._way.then:
            state[each.name] = each.after
            yield self._kind(each), Variant(release, tuple(state.items())), each

    def _kind(self, setting: SettingChange) -> Kind:
        return "rule" if self._switched(setting) is not None else "setting"

    def _switched(self, setting: SettingChange) -> ReleaseRule | None:
        return _rule_of_one(self._before.traffic, self._after.traffic, setting.name)

    def _simulate(self, variants: Sequence[Variant]) -> None:
        for variant, outcome in self._before.simulated(variants):
            self._done[variant] = outcome

    def _narrow(self, simulated: Outcome) -> None:
        """Find between which releases the figures change: halve each span whose ends differ."""
        if self._upgrade is None:
            return
        first, last = self._upgrade
        old = self._done[Variant("", self._first_settings())] if self._way.first else simulated
        new = self._done[Variant(last, self._way.held)]
        self._steps = list(
            self._halve((first, old), (last, new), list(self._between))
        )  # all of them, or none

    def _first_settings(self) -> tuple[tuple[str, Setting], ...]:
        return tuple((each.name, each.after) for each in self._way.first)

    def _halve(
        self, old: tuple[str, Outcome], new: tuple[str, Outcome], between: list[str]
    ) -> Iterator[tuple[str, str]]:
        """The pairs of neighbours whose figures differ."""
        if not change(old[1], new[1]):
            return
        while between:
            middle = between[len(between) // 2]
            place, variant = between.index(middle), Variant(middle, self._way.held)
            try:
                self._simulate([variant])
                why = self._done[variant].error
            except LedgerError as error:
                why = str(error)
            finally:
                self._before.end(middle)
            if why:
                self._missing.append(f"{middle}: {why}")
                del between[place]
                continue
            found = self._done[variant]
            yield from self._halve(old, (middle, found), between[:place])
            yield from self._halve((middle, found), new, between[place + 1 :])
            return
        yield old[0], new[0]

    # --- rows -----------------------------------------------------------------------------------------

    def _rows(self, simulated: Outcome, last: Sequence[Outcome], simulated_after: Outcome) -> Iterator[Row]:
        """The rows that were simulated, in their order; none after one that is missing."""
        before, after = self._before, self._after
        present = before.outcome(RECORDED, before.traffic.version, before.recorded)
        yield Row(kind="recorded", changed="before, recorded", outcome=present, change=None)
        for kind, changed, outcome, rules in self._changes(simulated, last, simulated_after):
            if outcome is None:
                return
            moved = change(present, outcome)
            known = rules if moved or kind != "release" else []  # no reason is sought for no change
            yield Row(
                kind=kind, changed=changed, outcome=outcome, change=moved, rules=[rule.id for rule in known]
            )
            present = outcome
        outcome = after.outcome(RECORDED, after.traffic.version, after.recorded)
        words = "residual: after, recorded"
        yield Row(kind="residual", changed=words, outcome=outcome, change=change(present, outcome))

    def _changes(
        self, simulated: Outcome, last: Sequence[Outcome], simulated_after: Outcome
    ) -> Iterator[Found]:
        yield "residual", "residual: before, simulated", simulated, []
        for kind, variant, setting in self._configurations():
            if setting is None:
                yield from self._releases(self._done.get(variant))
            else:
                rule = self._switched(setting)
                yield kind, setting.words, self._done.get(variant), [] if rule is None else [rule]
        with_it = ", ".join(each.words for each in self._way.together)
        words = f"traffic, with {with_it}" if with_it else "traffic"
        yield "traffic", words, last[0] if last else None, []
        yield "step times", "step times: after, simulated", simulated_after, []

    def _releases(self, whole: Outcome | None) -> Iterator[Found]:
        """One row for each pair of releases between which the figures change, or one for all."""
        assert self._upgrade is not None
        steps = self._steps or [self._upgrade]
        for old, new in steps:
            found = whole if new == self._upgrade[1] else self._done.get(Variant(new, self._way.held))
            yield "release", f"release {old} -> {new}", found, self._candidates(old, new)

    def _candidates(self, old: str, new: str) -> list[ReleaseRule]:
        """The rules that begin or end there, without those that are held off meanwhile."""
        settings = self._before.traffic.configuration
        held = dict(self._way.held)
        found = begun(old, new, settings) + begun(new, old, settings)
        return [
            rule
            for rule in found
            if rule.switch is None or held.get(rule.switch.setting, rule.switch.default) != rule.switch.off
        ]
