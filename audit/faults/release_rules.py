"""Rules of the scheduler that differ from release to release, one file of ``rules/`` each.

A rule is no fault: the engine does what it is meant to do, and its figures change with it. A file's name is
the rule's id. A file that has an unknown field, or a value of a wrong type, is not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources

import msgspec

from . import conditions
from .catalogue import Strict, short_name
from .releases import EXAMINED, Affected


class Switch(Strict, frozen=True, kw_only=True):
    """The setting that turns a rule off, by vLLM's name; its default in releases with the rule; and the value
    with which the rule does nothing."""

    setting: str
    default: bool | int | float | str | None
    off: bool | int | float | str | None


class ReleaseRule(Strict, frozen=True, kw_only=True):
    """One rule. ``id`` is the name of its file.

    ``title``: what the scheduler does, in one line. ``says``: one sentence each. ``where``: the code.
    ``conditions``: words of :mod:`.conditions`, all of which must hold. ``settings``: the settings that it
    depends on, by vLLM's names. ``switch``: None: no setting turns it off.
    """

    id: str = ""
    title: str
    says: tuple[str, ...]
    where: str
    releases: Affected
    conditions: tuple[str, ...] = ()
    settings: tuple[str, ...]
    switch: Switch | None = None
    links: tuple[str, ...]

    def holds_in(self, version: str) -> bool:
        """Whether a release is known to have it; one that was not examined is not, if its neighbours
        differ."""
        return self.releases.state("vllm", version) == "has"

    @property
    def named_links(self) -> list[tuple[str, str]]:
        """Each link with its short name, such as ``vLLM#42656``."""
        return [(short_name(link), link) for link in self.links]

    @property
    def span(self) -> str:
        """The releases that have it."""
        if self.releases.first == EXAMINED["vllm"][0] and not self.releases.last:
            return f"all releases since {self.releases.first}"
        return self.releases.span


@cache
def release_rules() -> dict[str, ReleaseRule]:
    """Every rule by its id, in the order of the ids."""
    files = resources.files(__package__).joinpath("rules").iterdir()
    by_id = {file.name.removesuffix(".json"): file for file in files if file.name.endswith(".json")}
    return {id: msgspec.structs.replace(read(by_id[id].read_bytes()), id=id) for id in sorted(by_id)}


def read(file: bytes) -> ReleaseRule:
    """The rule in a file; raises :class:`msgspec.ValidationError` if it is not valid."""
    return msgspec.json.decode(file, type=ReleaseRule)


def begun(before: str, after: str, settings: Mapping[str, object]) -> list[ReleaseRule]:
    """The rules that ``after`` has and ``before`` does not, without those that an engine's settings rule
    out."""
    return [rule for rule in _possible(settings) if rule.holds_in(after) and not rule.holds_in(before)]


def _possible(settings: Mapping[str, object]) -> Iterable[ReleaseRule]:
    for rule in release_rules().values():
        if conditions.unmet(rule.conditions, settings) is not None:
            yield rule


def by_switch() -> dict[str, ReleaseRule]:
    """The rules that a setting turns off, by the setting."""
    return {rule.switch.setting: rule for rule in release_rules().values() if rule.switch is not None}
