"""What ``kvledger doctor`` says about level ``content``: which groups of KV caches are checked, and why not.

Without an engine only vLLM's source files tell. What an engine really had is in the newest journal.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from .. import engines
from ..checks.registry import catalogue
from ..engines.content.layout import CHECKED_SPECS, STATES
from ..engines.source_files import cache_declarations
from ..errors import LedgerError
from ..events import ContentWatched
from ..faults.catalogue import KnownOfRelease, of_release
from ..hooks import EngineMismatch
from ..journal.catalogue import ENGINE, WORKER, Catalogue, content_watch
from ..release_semantics import CONTRACTS, limits, meanings
from ..replay.journal_parts import engine_of

JOURNALS_LOOKED_AT = 16
"""The newest journals that are searched for one of level ``content``."""

_REASONS = {
    "CircularBufferSpec": "blocks are rewritten in place",
    "CrossAttentionSpec": "blocks belong to encoder inputs",
    "EncoderOnlyAttentionSpec": "it has no KV cache",
}


class ContentsDiagnosis(msgspec.Struct, frozen=True):
    """Level ``content`` in this environment. ``problem``: why it would check nothing; "" if it would."""

    problem: str
    places: str
    """What tells where a block lies."""
    form: str
    """What computes fingerprints."""
    checked: list[str]
    """Kinds of groups that are checked, by vLLM's class names."""
    not_checked: dict[str, str]
    """Other kinds in this release, and why they are not checked."""
    journal: str = ""
    """The newest journal of level ``content``."""
    groups: list[str] = []
    """The groups that were checked there, and how their KV caches lay in memory."""
    excluded: list[str] = []
    """A sentence for each group that was not checked there, or for all."""
    recomputed: str = ""
    """Whether blocks that are computed again were compared there; "" if nobody asked for it."""


def diagnose_contents(directory: str | None) -> ContentsDiagnosis:
    """Examine this environment, and the newest journal in ``directory``."""
    found = cache_declarations()
    missing = [name for name in ("torch", "numpy") if find_spec(name) is None]
    journal, watched = newest_watch(Path(directory)) if directory else ("", None)
    return ContentsDiagnosis(
        problem=f"{missing[0]} is not installed" if missing else "" if found else _UNKNOWN,
        places="" if found is None else "strides of KVCacheTensor" if found.strides else _SHAPES,
        form="Triton on a GPU, NumPy on a CPU" if find_spec("triton") else "torch on a GPU, NumPy on a CPU",
        checked=[name for name in found.specs if name in (*CHECKED_SPECS, STATES)] if found else [],
        not_checked={
            name: _REASONS.get(name, "kvledger does not know how its blocks are filled")
            for name in (found.specs if found else ())
            if name not in (*CHECKED_SPECS, STATES)
        },
        journal=journal,
        groups=[] if watched is None else group_sentences(watched),
        excluded=[] if watched is None else watched.excluded,
        recomputed="" if watched is None else watched.recomputed,
    )


_UNKNOWN = "this release does not declare its KV caches in vllm/v1/kv_cache_interface.py"
_SHAPES = "shapes that attention backends declare"


def newest_watch(directory: Path) -> tuple[str, ContentWatched | None]:
    """The newest journal in which a worker checked contents or said why not: its name, and what it said."""
    try:
        folders = Catalogue(directory).newest_first(ENGINE, WORKER)
    except OSError:
        return "", None
    for folder in folders[:JOURNALS_LOOKED_AT]:
        try:
            watched = content_watch(folder)
        except (LedgerError, OSError):  # a live engine may remove a segment meanwhile
            continue
        if watched is not None:
            return folder.name, watched
    return "", None


def group_sentences(watched: ContentWatched) -> list[str]:
    """One sentence for each group that is checked."""
    rows = watched.groups
    layouts = [*watched.layouts, *[""] * (len(rows) // 4)]
    sentences = []
    for index in range(0, len(rows) - 3, 4):
        group, tokens, layers, size = rows[index : index + 4]
        how = f"; {layouts[index // 4]}" if layouts[index // 4] else ""
        sentences.append(
            f"group {group}: {watched.blocks:,} blocks of {tokens} tokens and {size:,} bytes, "
            f"{layers} {'tensor' if layers == 1 else 'tensors'}{how}"
        )
    return sentences


# --- doctor faults -------------------------------------------------------------------------------------
#
# Which known faults concern the engine installed here, with the settings that its last journal recorded.
#
# An engine's settings are known only once it has run: from the newest journal in the folder, if the same
# release wrote it. Without one, each fault is named with all its conditions.


class FaultsHere(msgspec.Struct, frozen=True):
    """What is known of the installed releases. ``journal``: whose engine's settings count; "" for none."""

    journal: str
    releases: list[KnownOfRelease]


def diagnose_faults(
    versions: Mapping[str, str | None], adapter: str | None, directory: str | None
) -> FaultsHere:
    """The faults of the installed releases that neither the environment nor the last engine rules out."""
    journal, settings = _last_engine(Path(directory), versions.get("vllm")) if directory else ("", {})
    settings = {**settings, "lmcache": versions.get("lmcache")}
    if adapter is not None:
        settings["v0"] = adapter.startswith("v0")
    here = ((product, versions.get(product)) for product in CONTRACTS)
    return FaultsHere(journal, [of_release(product, each, settings) for product, each in here if each])


def installed() -> dict[str, str]:
    """The releases of vLLM, LMCache and SGLang in this environment, by product, without an import of any."""
    found = {"vllm": _vllm(), "lmcache": version_of("lmcache"), "sglang": version_of("sglang")}
    return {product: each for product, each in found.items() if each}


def _vllm() -> str | None:
    try:
        source = engines.host_source()
    except ModuleNotFoundError:
        return None
    return source.version if source is not None else version_of("vllm")


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution; None if there is none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _last_engine(directory: Path, release: str | None) -> tuple[str, dict[str, object]]:
    """The newest journal that an engine of this release wrote here, and the engine's settings."""
    try:
        newest = next(iter(Catalogue(directory).newest_first(ENGINE)), None)
        engine = None if newest is None else engine_of(newest)
    except (LedgerError, OSError):  # there is no folder, or a live engine removes a segment meanwhile
        return "", {}
    if newest is None or engine is None or engine.version != release:
        return "", {}
    return newest.name, dict(engine.configuration)


# --- doctor --------------------------------------------------------------------------------------------
#
# Which known faults the vLLM installed here has, whether kvledger can observe it, and what it can check.
#
# No engine is started: the doctor compares the signatures of vLLM's classes with those that the adapters
# expect. It reads them from vLLM's source files. It imports vLLM, which takes many seconds, only if the
# files do not tell or the caller wants to know whether the import works. What an engine-reported figure
# means in a release comes from ``release_semantics``.


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
    by_figure = meanings(host or "", adapter.NAME if adapter else "")
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
