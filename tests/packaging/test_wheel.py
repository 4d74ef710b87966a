"""What a wheel contains: the folders and files of the package, every file in them, and nothing else."""

import ast
import configparser
import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hatchling import build

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[2]
FOLDERS = ("audit", "exporters", "dashboards")
FILES = ("__init__.py", "__main__.py", "cli.py", "cli_options.py", "cli_run.py", "py.typed")

Build = Callable[[str], str]


def built(how: Build, to: Path) -> Path:
    """Build the checkout with a function of hatchling, which works on the current folder."""
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        return to / how(str(to))
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(built(build.build_wheel, tmp_path_factory.mktemp("wheel")))


def package_files(wheel: zipfile.ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if ".dist-info/" not in name}


def checkout_files() -> set[str]:
    """The package's files that git tracks or would add, under the names that they get in the wheel."""
    # CI often clones as one user and tests as another: accept a checkout of any owner.
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        [*git, *FOLDERS, *FILES], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return {f"kvledger/{name}" for name in listed.split("\0") if name and (ROOT / name).exists()}


def test_the_wheel_contains_exactly_the_files_of_the_checkout(wheel: zipfile.ZipFile) -> None:
    assert checkout_files() == package_files(wheel)


def test_the_wheel_installs_one_top_level_package(wheel: zipfile.ZipFile) -> None:
    """A top-level `cli`, `audit` or `tests` would collide in a user's environment."""
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {"kvledger"} == {top for top in tops if not top.endswith(".dist-info")}


def test_files_in_the_wheel_are_those_that_src_links_to(wheel: zipfile.ZipFile) -> None:
    for name in FILES:
        assert (ROOT / "src/kvledger" / name).read_bytes() == wheel.read(f"kvledger/{name}")


def test_a_source_distribution_builds_the_same_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    sdist = built(build.build_sdist, tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    script = "import sys; from hatchling import build; print(build.build_wheel(sys.argv[1]))"
    ran = subprocess.run(
        [sys.executable, "-c", script, tmp_path], cwd=unpacked, capture_output=True, text=True, check=True
    )
    with zipfile.ZipFile(tmp_path / ran.stdout.split()[-1]) as second:
        assert package_files(wheel) == package_files(second)


def test_an_editable_install_adds_one_path_and_copies_no_file(tmp_path: Path) -> None:
    """A copied `kvledger/__init__.py` would come first on the path and hide the links."""
    editable = zipfile.ZipFile(built(build.build_editable, tmp_path))
    assert {"_kvledger.pth"} == package_files(editable)
    assert str(ROOT / "src") == editable.read("_kvledger.pth").decode()


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    [name] = (name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
    parser = configparser.ConfigParser()
    parser.read_string(wheel.read(name).decode())
    assert {
        "console_scripts": {"kvledger": "kvledger.cli:main"},
        "pytest11": {"kvledger": "kvledger.audit.entry.pytest_plugin"},
        "vllm.general_plugins": {"kvledger": "kvledger.audit.entry.plugin:install"},
        "sglang.srt.plugins": {"kvledger": "kvledger.audit.entry.plugin:install_in_sglang"},
    } == {section: dict(parser[section]) for section in parser.sections()}


def test_the_wheel_runs_from_its_own_files(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Unpacked and first on the path, the wheel imports its own modules and reports its version."""
    wheel.extractall(tmp_path)
    script = """if True:
        import importlib, json, sys
        sys.path.insert(0, sys.argv[1])
        import kvledger
        light = sorted(name for name in sys.modules if name.startswith("kvledger"))
        names = ["audit.hooks", "audit.entry.plugin", "exporters", "dashboards", "cli"]
        files = [importlib.import_module(f"kvledger.{name}").__file__ for name in names]
        print(json.dumps([kvledger.__version__, light, files]))
    """
    ran = subprocess.run(
        [sys.executable, "-c", script, tmp_path], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    version, light, files = json.loads(ran.stdout)
    assert version in wheel.filename
    assert ["kvledger"] == light
    assert [] == [file for file in files if not Path(file).is_relative_to(tmp_path)]


USER = """import kvledger

audit = kvledger.Audit("trace")
verdict: str = audit.verdict
external: int = audit.totals.external
request: str | None = audit.violations[0].request
print(audit.why(by="lora").data, audit.account("a").prompt_tokens)


def attached(llm: object) -> int:
    with kvledger.attach(llm, strict=True) as live:
        try:
            print(live.summary().data, live.save("trace").name)
        except (kvledger.AuditError, kvledger.LedgerError) as error:
            print(error)
    return live.totals.computed
"""


WRONG = """
kvledger.NoSuchName
audit.totals.outside
"""

CHECKERS = {"mypy": ["--strict"], "pyright": []}


@pytest.fixture(scope="module")
def user(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's environment: the wheel with what it requires, and the type checkers."""
    place = tmp_path_factory.mktemp("user")
    venv.create(place, with_pip=True)
    assert wheel.filename is not None
    install = [place / "bin/pip", "install", "--quiet", wheel.filename, *CHECKERS]
    subprocess.run(install, check=True, env=os.environ | {"PYTHONPATH": ""})
    return place


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_users_script_is_type_checked(checker: str, user: Path, tmp_path: Path) -> None:
    """Against the installed wheel: only the two names that are not there are wrong. npm has pyright."""
    (tmp_path / "user.py").write_text(USER + WRONG)
    ran = subprocess.run(
        [user / "bin" / checker, *CHECKERS[checker], "user.py"],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{user / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in ran.stdout.splitlines() if "error: " in line or "error -" in line]
    assert 2 == len(errors), ran.stdout + ran.stderr
    assert "NoSuchName" in errors[0] and "outside" in errors[1]


def test_completion_shows_the_public_names(user: Path) -> None:
    script = "import kvledger, rlcompleter; print(rlcompleter.Completer(vars()).attr_matches('kvledger.'))"
    ran = subprocess.run(
        [user / "bin/python", "-I", "-c", script], capture_output=True, text=True, check=True
    )
    assert {"kvledger.attach(", "kvledger.Audit(", "kvledger.LedgerError("} <= set(
        ast.literal_eval(ran.stdout)
    )


def test_the_links_in_src_are_relative_and_lead_to_the_folders_and_files_of_the_root() -> None:
    entries = {path.name: path for path in (ROOT / "src/kvledger").iterdir() if path.name != "__pycache__"}
    assert {*FOLDERS, *FILES} == set(entries)
    assert {name: Path("../..", name) for name in entries} == {
        name: link.readlink() for name, link in entries.items()
    }
