"""What a release is made of: hashes of what CI installs, and the wheel with its SBOM and its provenance.

    python scripts/release.py hashes        writes constraints/hashes/test.txt from the other constraints
    python scripts/release.py audit         asks whether a locked package has a known vulnerability
    python scripts/release.py build DIST    builds the wheel and writes both files beside it
    python scripts/release.py check DIST TAG   builds it again, and compares digests and the tag's version

The workflow .github/workflows/release.yml runs these, and what nobody else can: it signs with the identity of
the repository, and publishes.

The wheel is the same byte by byte wherever it is built from one commit. The provenance is what this script
knows; the workflow signs its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
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


AUDITOR = "pip-audit==2.10.1"


def audit() -> int:
    """Print what is known to be vulnerable; 1: something is, 3: it is not known of every package.

    pip-audit itself ends with 0 where the index has no data, and says "No known vulnerabilities found".
    """
    place = ROOT / "build/audit"
    if not (place / "bin/pip-audit").exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        subprocess.run([str(place / "bin/pip"), "install", "--quiet", AUDITOR], check=True)
    command = [str(place / "bin/pip-audit"), "--disable-pip", "--require-hashes", "--format", "json"]
    command += ["--progress-spinner", "off", "--requirement", str(LOCK)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found = json.loads(ran.stdout)["dependencies"]
    except ValueError:
        print("pip-audit said nothing:", (ran.stderr.strip().splitlines() or ["no reason"])[-1])
        return 3
    vulnerable = [each for each in found if each.get("vulns")]
    unknown = [each["name"] for each in found if "vulns" not in each]
    for each in vulnerable:
        print(each["name"], each["version"], *(one["id"] for one in each["vulns"]))
    print(f"{len(found)} packages: {len(vulnerable)} vulnerable, {len(unknown)} without data")
    return 1 if vulnerable else 3 if unknown or not found else 0


def check(folder: Path, tag: str) -> list[str]:
    """What is wrong with a built wheel and the files beside it."""
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        return [f"{folder} has {len(wheels)} wheels and not one"]
    (wheel,) = wheels
    wrong = []
    with tempfile.TemporaryDirectory() as again:
        if digest(build(Path(again))) != digest(wheel):
            wrong.append(f"{wheel.name} is not what this commit gives")
    (subject,) = json.loads(wheel.with_suffix(".provenance.json").read_text())["subject"]
    (said,) = json.loads(wheel.with_suffix(".cdx.json").read_text())["metadata"]["component"]["hashes"]
    if not subject["digest"]["sha256"] == said["content"] == digest(wheel):
        wrong.append("the files beside the wheel have another digest")
    version = wheel.name.split("-")[1]
    if tag and tag.removeprefix("v") != version:
        wrong.append(f"the tag is {tag}, and the wheel is of version {version}")
    with tempfile.TemporaryDirectory() as place, zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
        script = "import kvledger, sys; sys.exit(kvledger.__version__ != sys.argv[1])"
        environ = {**os.environ, "PYTHONPATH": place}
        command = [sys.executable, "-c", script, version]
        if subprocess.run(command, env=environ, cwd=place, check=False).returncode:
            wrong.append(f"the wheel's package is not of version {version}")
    return wrong


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
        case ["audit"]:
            sys.exit(audit())
        case ["build", place]:
            print(build(Path(place)))
        case ["check", place, *tag]:
            problems = check(Path(place), "".join(tag))
            print(*problems or ["The wheel is what this commit gives, and its files say so."], sep="\n")
            sys.exit(bool(problems))
        case _:
            sys.exit(__doc__)
