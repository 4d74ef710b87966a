"""The set-up of .venv, and the files that pin versions."""

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
Captured = pytest.CaptureFixture[str]
CONSTRAINTS = sorted((ROOT / "constraints").glob("*.txt"))


def pins(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if not line.startswith("#")]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """scripts/environment.py, applied to an empty folder instead of the checkout."""
    spec = importlib.util.spec_from_file_location("environment", ROOT / "scripts/environment.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path)
    monkeypatch.setattr(module, "WHOLE", tmp_path / "kvledger-whole.stamp")
    return module


def test_pip_options_become_variables_of_uv(environment: ModuleType) -> None:
    listed = """\
global.extra-index-url='file:///one file:///two'
global.find-links='/wheels\\n/more wheels'
global.timeout='60'
install.index-url='mirror'
"""
    assert {
        "UV_EXTRA_INDEX_URL": "file:///one file:///two",
        "UV_FIND_LINKS": "/wheels,/more,wheels",
        "UV_INDEX_URL": "mirror",
    } == environment.from_pip(listed)


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("global.index-url='a'\ninstall.index-url='b'", "b"),
        (":env:.index-url='c'\nglobal.index-url='a'\ninstall.index-url='b'", "c"),
    ],
)
def test_a_narrower_scope_takes_precedence(environment: ModuleType, listed: str, expected: str) -> None:
    assert {"UV_INDEX_URL": expected} == environment.from_pip(listed)


def test_other_options_are_ignored(environment: ModuleType) -> None:
    assert {} == environment.from_pip("global.require-virtualenv='true'\nfreeze.find-links='x'\n")


def test_the_first_route_that_works_is_used(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A script takes the place of uv: it logs its arguments, and succeeds only with PyTorch's index."""
    uv = tmp_path / "uv"
    uv.write_text('#!/bin/sh\necho "$@" >> calls; case "$*" in *--torch-backend*) ;; *) exit 1; esac\n')
    uv.chmod(0o755)
    monkeypatch.setattr(environment, "PYTHON", uv)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    environment.uv_install(["torch"], [([], {}), (["--torch-backend", "cpu"], {}), ([], {})])

    calls = [line.partition(f"{uv} ")[2] for line in (tmp_path / "calls").read_text().splitlines()]
    cpu = "--torch-backend cpu torch"
    assert ["torch --dry-run", f"{cpu} --dry-run", cpu] == calls


def test_equal_messages_of_uv_are_shown_once(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here uv prints the same for both routes: nothing."""
    monkeypatch.setattr(environment, "PYTHON", "/bin/false")
    with pytest.raises(SystemExit, match=r"uv can't install x") as exit:
        environment.uv_install(["x"], [([], {}), (["--torch-backend", "cpu"], {})])
    assert 2 == len(str(exit.value).split("\n\n"))


def test_a_venv_copied_from_elsewhere_is_not_whole(environment: ModuleType) -> None:
    environment.WHOLE.write_text("/elsewhere/.venv")
    assert not environment.is_whole()


def test_a_venv_without_an_interpreter_is_not_whole(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.WHOLE.write_text(str(tmp_path))
    monkeypatch.setattr(environment, "PYTHON", tmp_path / "bin/python")
    assert not environment.is_whole()


def test_the_output_of_a_command_goes_to_the_log(
    environment: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: Captured,
) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    environment.run(["sh", "-c", "echo resolved 250 packages >&2"])

    assert ("", "") == capfd.readouterr()
    assert "resolved 250 packages" in (tmp_path / ".venv.log").read_text().splitlines()


def test_a_command_that_fails_names_the_log(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    with pytest.raises(
        SystemExit, match=rf"exit code 3; its output is in {tmp_path}/\.venv\.log: sh -c exit 3"
    ):
        environment.run(["sh", "-c", "exit 3"])


def test_with_v_the_output_is_shown(
    environment: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: Captured,
) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    environment.progress.verbose = True
    environment.run(["echo", "resolved 250 packages"])

    assert "resolved 250 packages\n" == capfd.readouterr().out
    assert not (tmp_path / ".venv.log").exists()


def test_the_set_up_prints_one_line(
    environment: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: Captured,
) -> None:
    """Stand-ins install nothing; a second set-up prints nothing."""
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "key", lambda: "key")
    monkeypatch.setattr(environment, "works", lambda *command: True)
    monkeypatch.setattr(environment, "make_venv", lambda: environment.progress.step("creating"))
    monkeypatch.setattr(environment, "install", lambda target: environment.progress.step("installing"))
    environment.main("demo")
    first = capfd.readouterr().err
    environment.main("demo")

    assert "kvledger: setting up .venv (log: .venv.log) ... ready after 0 s\n" == first
    assert "" == capfd.readouterr().err


def test_a_set_up_that_fails_completes_its_line(
    environment: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: Captured,
) -> None:
    def broken() -> None:
        environment.progress.step("creating")
        raise SystemExit("the reason")

    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "make_venv", broken)
    with pytest.raises(SystemExit, match="the reason"):
        environment.main("demo")

    assert "kvledger: setting up .venv (log: .venv.log) ... failed after 0 s\n" == capfd.readouterr().err


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.name)
def test_constraints_are_sorted_names_with_exact_versions(path: Path) -> None:
    lines = pins(path)
    assert [] == [line for line in lines if not re.fullmatch(r"[a-z0-9][a-z0-9-]*==[0-9][0-9a-z.+]*", line)]
    assert lines == sorted(lines, key=lambda line: line.split("==")[0])


def test_no_name_is_pinned_twice() -> None:
    names = [line.split("==")[0] for path in CONSTRAINTS for line in pins(path)]
    assert [] == sorted({name for name in names if names.count(name) > 1})


def test_no_file_names_a_package_registry() -> None:
    """The machine's configuration names the registries. The patterns are split so that this file passes."""
    hosts = "|".join(("pypi" r"\.org", "python" r"hosted\.org", "download\\.pytorch"))
    git = ["git", "-c", "safe.directory=*", "grep", "--untracked", "-lE", hosts]
    ran = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (1, "") == (ran.returncode, ran.stdout)  # git returns 1 if nothing matches


def test_ci_runs_the_whole_check() -> None:
    script = ROOT / ".ci/run"
    assert script.stat().st_mode & 0o111
    for command in ("make test-all", "make releases ARGS=core"):
        assert command in script.read_text()
