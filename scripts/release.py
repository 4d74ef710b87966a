"""What a release is made of: hashes of what CI installs, and the wheel with its SBOM and its provenance.

    python scripts/release.py hashes        writes constraints/hashes/test.txt from the other constraints
    python scripts/release.py build DIST    builds the wheel and writes both files beside it

The wheel is the same byte by byte wherever it is built from one commit. The provenance is what this script
knows; the workflow .github/workflows/release.yml signs its own with the identity of the repository.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "constraints/hashes/test.txt"
PINNED = ("constraints/demo.txt", "constraints/test.txt")
NOT_LOCKED = ("torch",)
"""Each platform has builds of its own, from an index of its own."""

MIRRORS = ("UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_INDEX_URL")

_PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)
HEAD = (
    "# Hashes of what `make test` installs, for all platforms: scripts/release.py hashes writes this file.\n"
)


def pins() -> dict[str, str]:
    """The version of each package that is pinned, but torch."""
    text = "\n".join((ROOT / name).read_text() for name in PINNED)
    return {name: version for name, version in _PIN.findall(text) if name not in NOT_LOCKED}


def locked() -> dict[str, tuple[str, list[str]]]:
    """Version and SHA-256 digests of each package in the lock."""
    found: dict[str, tuple[str, list[str]]] = {}
    for block in re.split(r"\n(?=\S)", LOCK.read_text()):
        if pin := _PIN.match(block):
            found[pin[1]] = pin[2], re.findall(r"--hash=sha256:([0-9a-f]{64})", block)
    return found


def write_hashes() -> None:
    """Write the lock, with the hashes of all files that the public index has."""
    import environment

    command = [str(environment.PYTHON), "-m", "uv", "pip", "compile", "--quiet", "--no-deps", "-"]
    command += ["--generate-hashes", "--no-header", "--no-annotate", "--python-version", "3.11"]
    # Of the public index alone: a mirror may lack the files of other platforms.
    environ = {name: value for name, value in environment.uv_environ().items() if name not in MIRRORS}
    given = "".join(f"{name}=={version}\n" for name, version in pins().items())
    ran = subprocess.run(command, input=given, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    LOCK.write_text(HEAD + ran.stdout)


def build(folder: Path) -> Path:
    """Build the wheel into a folder, and write its SBOM and provenance beside it; returns the wheel."""
    git = ["git", "-c", "safe.directory=*", "-C", str(ROOT)]
    commit, seconds = subprocess.check_output([*git, "log", "-1", "--format=%H %ct"], text=True).split()
    environ = {**os.environ, "SOURCE_DATE_EPOCH": seconds}
    script = "import sys; from hatchling import build; print(build.build_wheel(sys.argv[1]))"
    command = [sys.executable, "-c", script, str(folder.resolve())]
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / subprocess.check_output(command, cwd=ROOT, env=environ, text=True).split()[-1]
    changed = bool(subprocess.check_output([*git, "status", "--porcelain"], text=True))
    for kind, data in (("cdx", sbom(wheel)), ("provenance", provenance(wheel, commit, changed))):
        wheel.with_suffix(f".{kind}.json").write_text(json.dumps(data, indent=1) + "\n")
    return wheel


def digest(path: Path) -> str:
    """The SHA-256 digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sbom(wheel: Path) -> dict[str, Any]:
    """The wheel, what it requires, and the versions that CI tested it with, in CycloneDX 1.5."""
    name, version = wheel.name.split("-")[:2]
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"{name}-{version}.dist-info/METADATA").decode()
    required = set(re.findall(r"^Requires-Dist: ([A-Za-z0-9._-]+)(?!.*extra ==)", metadata, re.MULTILINE))
    components = [
        {
            "type": "library",
            "bom-ref": f"pkg:pypi/{each}@{of[0]}",
            "purl": f"pkg:pypi/{each}@{of[0]}",
            "name": each,
            "version": of[0],
            "scope": "required" if each in required else "optional",
            "hashes": [{"alg": "SHA-256", "content": one} for one in of[1]],
        }
        for each, of in sorted(locked().items())
    ]
    ours = f"pkg:pypi/{name}@{version}"
    itself = {
        "type": "library",
        "bom-ref": ours,
        "purl": ours,
        "name": name,
        "version": version,
        "hashes": [{"alg": "SHA-256", "content": digest(wheel)}],
    }
    needs = [each["bom-ref"] for each in components if each["scope"] == "required"]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": itself},
        "components": components,
        "dependencies": [{"ref": ours, "dependsOn": needs}],
    }


def provenance(wheel: Path, commit: str, changed: bool) -> dict[str, Any]:
    """From which commit the wheel was built and by what, as an in-toto statement; nobody has signed it."""
    built = {
        "buildType": "https://packaging.python.org/specifications/build-backend",
        "externalParameters": {"commit": commit, "changedFiles": changed},
        "resolvedDependencies": [{"name": "hatchling", "version": locked()["hatchling"][0]}],
    }
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": wheel.name, "digest": {"sha256": digest(wheel)}}],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {"buildDefinition": built, "runDetails": {"builder": {"id": "scripts/release.py"}}},
    }


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["hashes"]:
            write_hashes()
        case ["build", place]:
            print(build(Path(place)))
        case _:
            sys.exit(__doc__)
