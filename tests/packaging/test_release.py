"""What a release is made of: hashes of all that CI installs, and the same wheel from the same commit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import environment, release

ROOT = Path(__file__).parents[2]


def test_everything_that_is_pinned_has_hashes() -> None:
    locked = release.locked()

    assert release.pins() == {name: version for name, (version, _) in locked.items()}
    assert all(hashes for _, hashes in locked.values())


def test_the_installer_is_given_the_hashes() -> None:
    assert all("constraints/hashes/test.txt" in pins for pins in environment.PINS.values())
    assert ["--build-constraint", "constraints/hashes/test.txt"] == environment.BUILD_PINS[-2:]


@pytest.mark.packaging
def test_one_commit_gives_one_wheel_byte_by_byte(tmp_path: Path) -> None:
    """Built twice, of two copies with other times and other rights, in processes with other settings."""
    git = ["git", "-c", "safe.directory=*"]
    wheels = []
    for number, mask in enumerate((0o022, 0o077)):
        copy = tmp_path / f"copy-{number}"
        subprocess.run([*git, "clone", "--quiet", str(ROOT), str(copy)], check=True, umask=mask)
        for path in copy.rglob("*"):
            if ".git" not in path.parts and not path.is_symlink():
                os.utime(path, (number * 1e6, number * 1e6))
        shutil.copy(ROOT / "scripts/release.py", copy / "scripts")
        shutil.copy(ROOT / "scripts/environment.py", copy / "scripts")
        shutil.copytree(release.LOCK.parent, copy / "constraints/hashes", dirs_exist_ok=True)
        command = [sys.executable, "scripts/release.py", "build", str(tmp_path / f"dist-{number}")]
        environ = {**os.environ, "PYTHONHASHSEED": str(number), "TZ": f"UTC+{number}"}
        built = subprocess.run(
            command, cwd=copy, env=environ, umask=mask, capture_output=True, text=True, check=True
        )
        wheels.append(Path(built.stdout.split()[-1]))

    first, second = wheels
    assert first.read_bytes() == second.read_bytes()
    bill = json.loads(first.with_suffix(".cdx.json").read_text())
    (itself,) = bill["metadata"]["component"]["hashes"]
    (subject,) = json.loads(first.with_suffix(".provenance.json").read_text())["subject"]
    assert release.digest(first) == itself["content"] == subject["digest"]["sha256"]
    assert release.locked().keys() == {each["name"] for each in bill["components"]}
    assert "pkg:pypi/msgspec" in " ".join(bill["dependencies"][0]["dependsOn"])

    def checked(*tag: str) -> str:
        command = [sys.executable, "scripts/release.py", "check", str(first.parent), *tag]
        return subprocess.run(command, cwd=tmp_path / "copy-1", capture_output=True, text=True).stdout

    version = bill["metadata"]["component"]["version"]
    assert checked(f"v{version}").startswith("The wheel is what this commit gives")
    assert "the tag is v9.9" in checked("v9.9")
    first.write_bytes(first.read_bytes() + b"\0")
    assert "is not what this commit gives" in checked()


def test_a_package_without_data_is_not_called_free_of_vulnerabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip-audit itself ends with 0 then."""
    (tmp_path / "build/audit/bin").mkdir(parents=True)
    program = tmp_path / "build/audit/bin/pip-audit"
    monkeypatch.setattr(release, "ROOT", tmp_path)
    free, skipped = {"name": "a", "version": "1", "vulns": []}, {"name": "b", "skip_reason": "not found"}
    bad = {"name": "c", "version": "2", "vulns": [{"id": "PYSEC-1"}]}
    cases = (([free], 0), ([free, skipped], 3), ([free, skipped, bad], 1), ([], 3), (None, 3))
    for found, code in cases:
        text = json.dumps({"dependencies": found}) if found is not None else ""
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        program.chmod(0o755)
        assert code == release.audit(), found
    assert "c 2 PYSEC-1\n3 packages: 1 vulnerable, 1 without data" in capsys.readouterr().out
