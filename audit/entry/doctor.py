"""Whether an engine started in this environment would be observed, and what could be checked of it.

Nothing is started: the signatures of vLLM's classes are compared. What the figures mean comes from
``engines/semantics.py``, everything else is looked at here.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import msgspec

from .. import engines
from ..checks.registry import catalogue
from ..hooks import EngineMismatch
from ..release_semantics import limits, meanings

PLUGIN = "kvledger.audit.entry.plugin:install"
GROUP = "vllm.general_plugins"


class Meant(msgspec.Struct, frozen=True):
    """What one figure means in this release."""

    figure: str
    word: str
    says: str


class Diagnosis(msgspec.Struct, frozen=True):
    """All that was found; ``problems`` are the reasons why an engine would not be observed."""

    versions: dict[str, str | None]
    adapter: str | None
    hooks: list[str]
    missing_hooks: list[str]
    meanings: list[Meant]
    checked: list[str]
    checked_in_part: dict[str, str]
    not_checked: dict[str, str]
    connectors: dict[str, str]
    plugin: str | None
    directory: str | None
    problems: list[str]

    @property
    def observed(self) -> bool:
        """Whether the plugin would observe an engine here."""
        return not self.problems


def diagnose() -> Diagnosis:
    """Look at this environment. Imports vLLM, if it is there; never raises for what it finds."""
    host, adapter, scheduler, problems = _host()
    meant = meanings(host or "", v0=bool(adapter and adapter.NAME.startswith("v0")))
    unchecked, in_part = limits(meant)
    names = list(catalogue()) if adapter else []
    plugin, of_plugin = _plugin()
    directory, of_directory = _directory()
    live, missing = _hooks(adapter, scheduler)
    return Diagnosis(
        versions={"vllm": host, "lmcache": _version("lmcache"), "torch": _version("torch")},
        adapter=adapter.NAME if adapter else None,
        hooks=live,
        missing_hooks=missing,
        meanings=[Meant(row.figure, row.word, row.says) for row in meant.values()],
        checked=[name for name in names if name not in unchecked],
        checked_in_part={name: why for name, why in in_part.items() if name in names},
        not_checked={name: why for name, why in unchecked.items() if name in names},
        connectors=_connectors() if adapter and not adapter.NAME.startswith("v0") else {},
        plugin=plugin,
        directory=directory,
        problems=[*problems, *of_plugin, *of_directory],
    )


def _host() -> tuple[str | None, Any, Any, list[str]]:
    """Version, adapter, a scheduler to compare with, and what is wrong."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # vLLM logs there while it is imported
            host = engines.host_version()
    except ModuleNotFoundError as error:
        return None, None, None, [f"vLLM can't be imported: {error}."]
    except Exception as error:  # a host that is broken
        return None, None, None, [f"vLLM can't be imported: {type(error).__name__}: {error}."]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            scheduler = engines.bare_scheduler()
            adapter = engines.choose(scheduler)
            unreachable = engines.out_of_reach(adapter)
    except EngineMismatch as mismatch:
        return host, None, None, [f"vLLM {host} can't be observed: {mismatch}."]
    except Exception as error:  # not laid out as any release that we know
        return host, None, None, [f"vLLM {host} can't be looked at: {type(error).__name__}: {error}."]
    return host, adapter, scheduler, [unreachable] if unreachable else []


def _hooks(adapter: Any, scheduler: Any) -> tuple[list[str], list[str]]:
    """Names of the hooks that would be live, and of optional ones that the host lacks."""
    live: list[str] = []
    missing: list[str] = []
    for hook in adapter.HOOKS if adapter else ():
        name = f"{hook.owner}.{hook.method}".lstrip(".")
        owner = getattr(scheduler, hook.owner, None) if hook.owner else scheduler
        (live if hasattr(owner, hook.method) else missing).append(name)
    return live, missing


def _connectors() -> dict[str, str]:
    """What is read of each connector's plans, and what is not checked where it is not."""
    told = {
        name: ", ".join(reads)
        for name, reads in engines.read_connectors().items()
        if not name.startswith("Scripted")
    }
    told["no tracker"] = "connector/tracker-lag and connector/save-gap are not checked"
    told["any other connector"] = (
        "nothing: besides, connector/promise-not-loaded sees only asynchronous loads that a request "
        "did not wait for"
    )
    return told


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _plugin() -> tuple[str | None, list[str]]:
    """The entry point as vLLM would find it, and why it would not be called."""
    found = [point for point in entry_points(group=GROUP) if point.value == PLUGIN]
    if not found:
        return None, [f"kvledger is not installed as a plugin of vLLM (entry point group {GROUP})."]
    name = found[0].name
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and name not in allowed.split(","):
        return name, [f"VLLM_PLUGINS is {allowed!r} and leaves {name} out."]
    return name, []


def _directory() -> tuple[str | None, list[str]]:
    """``KVLEDGER_DIR``, and why no journal could be written there."""
    said = os.environ.get("KVLEDGER_DIR")
    if not said:
        return None, ["KVLEDGER_DIR is not set: the plugin stays inert."]
    place = Path(said)
    there = next((path for path in (place, *place.absolute().parents) if path.exists()), place)
    if not there.is_dir():
        return said, [f"KVLEDGER_DIR is {said}, but {there} is no folder."]
    if not os.access(there, os.W_OK | os.X_OK):
        return said, [f"KVLEDGER_DIR is {said}, but {there} is not writable."]
    return said, []
