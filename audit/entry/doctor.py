"""Which known faults the vLLM installed here has, whether kvledger can observe it, and what it can check.

No engine is started: the doctor compares the signatures of vLLM's classes with those that the adapters
expect. It reads them from vLLM's source files. It imports vLLM, which takes many seconds, only if the files
do not tell or the caller wants to know whether the import works. What an engine-reported figure means in a
release comes from ``release_semantics``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from .. import engines
from ..checks.registry import catalogue
from ..hooks import EngineMismatch
from ..release_semantics import limits, meanings
from .doctor_contents import ContentsDiagnosis, diagnose_contents
from .doctor_faults import FaultsHere, diagnose_faults, version_of

PLUGIN = "kvledger.audit.entry.plugin:install"
GROUP = "vllm.general_plugins"


class FigureMeaning(msgspec.Struct, frozen=True):
    """What one engine-reported figure means in this release."""

    figure: str
    word: str
    says: str


class Diagnosis(msgspec.Struct, frozen=True):
    """The doctor's result; ``problems`` are the reasons why an engine would not be observed."""

    versions: dict[str, str | None]
    adapter: str | None
    hooks: list[str]
    missing_hooks: list[str]
    meanings: list[FigureMeaning]
    checked: list[str]
    checked_in_part: dict[str, str]
    not_checked: dict[str, str]
    connectors: dict[str, str]
    plugin: str | None
    directory: str | None
    problems: list[str]
    faults: FaultsHere
    examined: str = "import"
    """How vLLM was examined: ``source`` (its files were read) or ``import``."""
    contents: ContentsDiagnosis | None = None
    """What level ``content`` would check; None for the v0 scheduler, and where vLLM can't be observed."""

    @property
    def observed(self) -> bool:
        """Whether the plugin would observe an engine here."""
        return not self.problems


class _Host(NamedTuple):
    """The installed vLLM: its version, its adapter, and a scheduler to compare signatures with."""

    version: str | None = None
    adapter: Any = None
    scheduler: Any = None
    problems: tuple[str, ...] = ()
    examined: str = "import"


def diagnose(
    *, with_import: bool = False, importing: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Diagnosis:
    """Examine this environment. A broken vLLM is a problem, not an error.

    ``with_import`` imports vLLM even where its source files tell everything. ``importing`` makes the context
    in which an import runs, such as a spinner.
    """
    found = None if with_import else _host_from_source()
    if found is None:
        with importing():
            found = _host()
    host, adapter, scheduler = found.version, found.adapter, found.scheduler
    by_figure = meanings(host or "", v0=bool(adapter and adapter.NAME.startswith("v0")))
    unchecked, in_part = limits(by_figure)
    names = list(catalogue()) if adapter else []
    plugin, plugin_problems = _plugin()
    directory, directory_problems = _directory()
    present, missing = _hooks(adapter, scheduler)
    versions = {"vllm": host, "lmcache": version_of("lmcache"), "torch": version_of("torch")}
    return Diagnosis(
        versions=versions,
        adapter=adapter.NAME if adapter else None,
        hooks=present,
        missing_hooks=missing,
        meanings=[FigureMeaning(row.figure, row.word, row.says) for row in by_figure.values()],
        checked=[name for name in names if name not in unchecked],
        checked_in_part={name: why for name, why in in_part.items() if name in names},
        not_checked={name: why for name, why in unchecked.items() if name in names},
        connectors=_connectors() if adapter and not adapter.NAME.startswith("v0") else {},
        plugin=plugin,
        directory=directory,
        problems=[*found.problems, *plugin_problems, *directory_problems],
        faults=diagnose_faults(versions, adapter.NAME if adapter else None, directory),
        examined=found.examined,
        contents=diagnose_contents(directory) if adapter and not adapter.NAME.startswith("v0") else None,
    )


def _host_from_source() -> _Host | None:
    """vLLM as its source files describe it; None if only an import can tell."""
    try:
        source = engines.host_source()
    except ModuleNotFoundError as error:
        return _Host(problems=(f"vLLM can't be imported: {error}.",), examined="source")
    if source is None:
        return None
    version, scheduler, fields, has_seam = source
    try:
        adapter = engines.choose(scheduler, fields)
    except EngineMismatch as mismatch:
        return _Host(version, problems=(f"vLLM {version} can't be observed: {mismatch}.",), examined="source")
    unreachable = engines.out_of_reach(adapter, version, has_seam=has_seam)
    return _Host(version, adapter, scheduler, (unreachable,) if unreachable else (), "source")


def _host() -> _Host:
    """vLLM as it is when imported."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # vLLM logs to stdout while it is imported
            host = engines.host_version()
    except ModuleNotFoundError as error:
        return _Host(problems=(f"vLLM can't be imported: {error}.",))
    except Exception as error:  # a broken installation
        return _Host(problems=(f"vLLM can't be imported: {type(error).__name__}: {error}.",))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            scheduler = engines.bare_scheduler()
            adapter = engines.choose(scheduler)
            unreachable = engines.out_of_reach(adapter, host, has_seam=engines.has_scheduler_seam())
    except EngineMismatch as mismatch:
        return _Host(host, problems=(f"vLLM {host} can't be observed: {mismatch}.",))
    except Exception as error:  # its modules are not where any known release has them
        return _Host(host, problems=(f"vLLM {host} can't be examined: {type(error).__name__}: {error}.",))
    return _Host(host, adapter, scheduler, (unreachable,) if unreachable else ())


def _hooks(adapter: Any, scheduler: Any) -> tuple[list[str], list[str]]:
    """Names of the hooks that fit, and of the optional hooks whose method this release lacks."""
    present: list[str] = []
    missing: list[str] = []
    for hook in adapter.HOOKS if adapter else ():
        name = f"{hook.owner}.{hook.method}".lstrip(".")
        owner = getattr(scheduler, hook.owner, None) if hook.owner else scheduler
        (present if hasattr(owner, hook.method) else missing).append(name)
    return present, missing


def _connectors() -> dict[str, str]:
    """What kvledger reads from each connector's metadata, and which checks need more than that."""
    reads_of = {name: ", ".join(reads) for name, reads in engines.read_connectors().items()}
    reads_of["no tracker"] = "connector/tracker-lag and connector/save-gap are not checked"
    reads_of["any other connector"] = (
        "nothing; connector/promise-not-loaded then covers only asynchronous loads that a request "
        "did not wait for"
    )
    return reads_of


def _plugin() -> tuple[str | None, list[str]]:
    """The name of the entry point, and why vLLM would not call it."""
    points = [point for point in entry_points(group=GROUP) if point.value == PLUGIN]
    if not points:
        return None, [f"kvledger is not installed as a plugin of vLLM (entry point group {GROUP})."]
    name = points[0].name
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and name not in allowed.split(","):
        return name, [f"VLLM_PLUGINS is {allowed!r} and leaves {name} out."]
    return name, []


def _directory() -> tuple[str | None, list[str]]:
    """``KVLEDGER_DIR``, and why no journal could be written to it."""
    directory = os.environ.get("KVLEDGER_DIR")
    if not directory:
        return None, [
            "KVLEDGER_DIR is not set, so the plugin does nothing. Start the server with: "
            "KVLEDGER_DIR=~/kvledger vllm serve MODEL"
        ]
    path = Path(directory)
    existing = next((each for each in (path, *path.absolute().parents) if each.exists()), path)
    if not existing.is_dir():
        return directory, [f"KVLEDGER_DIR is {directory}, but {existing} is no folder."]
    if not os.access(existing, os.W_OK | os.X_OK):
        return directory, [f"KVLEDGER_DIR is {directory}, but {existing} is not writable."]
    return directory, []
