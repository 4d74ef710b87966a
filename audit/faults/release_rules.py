"""Rules of the scheduler that differ from release to release, one file of ``rules/`` each.

A rule is no fault: the engine does what it is meant to do, and its figures change with it. A file's name is
the rule's id. A file that has an unknown field, or a value of a wrong type, is not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

import msgspec

from ..release_semantics import release
from . import conditions
from .catalogue import Strict, files_by_id, short_name
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
    return {id: msgspec.structs.replace(read(file), id=id) for id, file in files_by_id("rules")}


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


# --- the page -------------------------------------------------------------------------------------------

HEADING = "## Rules of the releases\n"
_PROSE = """
Each is a file of `audit/faults/rules/`, read in the code of the released versions. *Since* is the first
release of the matrix that has the rule. A setting turns it off where one is named.
"""


def replaced(page: str) -> str:
    """``page`` with the table of the rules below its prose."""
    rows = sorted(release_rules().values(), key=lambda rule: (release(rule.releases.first), rule.id))
    parts = [_described(rule) for rule in rows]
    return page.partition(HEADING)[0] + HEADING + _PROSE + "\n" + "\n\n".join(parts) + "\n"


def _described(rule: ReleaseRule) -> str:
    off = rule.switch and f"`{rule.switch.setting}={rule.switch.off}`"
    facts = [
        ("Since", rule.releases.first + (f", until {rule.releases.last}" if rule.releases.last else "")),
        ("Where", rule.where),
        ("Condition", conditions.sentence(rule.conditions).removeprefix("if ")),
        ("Depends on", ", ".join(f"`{name}`" for name in rule.settings)),
        ("Turned off by", off or "no setting"),
        ("Sources", ", ".join(f"[{name}]({link})" for name, link in rule.named_links)),
    ]
    lines = [f"- {name}: {fact}" for name, fact in facts if fact]
    title = rule.title[0].upper() + rule.title[1:]
    return "\n".join((f"### {rule.id}", "", f"{title}. {' '.join(rule.says)}", "", *lines))
