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
