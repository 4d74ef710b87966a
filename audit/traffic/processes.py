"""A process that imports vLLM once, and worker processes that are forks of it.

Importing vLLM takes some 20 seconds and 600 MB; a fork takes milliseconds, and shares the memory. A fork has
only the thread that called it, so a lock that another thread holds stays locked in it. Therefore the process
starts no pool of threads (:data:`ONE_THREAD`) and forks only while it has a single thread. Otherwise
:meth:`VllmProcess.fork` returns None, and every worker is a process that imports vLLM by itself.

The two sides talk over a pair of sockets: one JSON line each way. A message with a file descriptor asks for a
fork, which serves the socket of that descriptor.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

from .. import temporary

ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
"""Environment variables with which numpy and torch start no threads of their own."""

FORKED_BY_ITSELF = "jemalloc_bg"
"""The beginning of the names of threads that do not forbid a fork."""

START_SECONDS = 600.0
"""How long a process may take to import vLLM. Where ten processes shared two cores it took five minutes."""

_READ_BYTES = 1 << 16
_PACKAGE = Path(__file__).resolve().parents[2]
_BOOT = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("kvledger", {init!r}, submodule_search_locations=[{folder!r}])
module = importlib.util.module_from_spec(spec)
sys.modules["kvledger"] = module
spec.loader.exec_module(module)
from {module} import serve
serve()
"""


class Line:
    """One end of the pair of sockets: a line out, a line back."""

    def __init__(self, ours: socket.socket) -> None:
        self._socket = ours
        self._buffer = b""
        """What came after the last whole line."""

    def ask(self, line: bytes, seconds: float, descriptor: int | None = None) -> bytes | None:
        """The answer to a line; None if none came in time or the other side is gone."""
        until = time.monotonic() + seconds
        with contextlib.suppress(OSError):  # a timeout is one too
            self._socket.settimeout(seconds)
            if descriptor is None:
                self._socket.sendall(line + b"\n")
            else:
                socket.send_fds(self._socket, [line + b"\n"], [descriptor])
            while b"\n" not in self._buffer:
                self._socket.settimeout(max(0.001, until - time.monotonic()))
                data = self._socket.recv(_READ_BYTES)
                if not data:
                    return None
                self._buffer += data
            answer, _, self._buffer = self._buffer.partition(b"\n")
            return answer
        return None

    def close(self) -> None:
        """Close this end, which ends the process at the other one unless it is busy."""
        with contextlib.suppress(OSError):
            self._socket.close()


class VllmProcess:
    """One process under an interpreter that has vLLM, and the forks of it.

    ``command`` stands in front of the interpreter's options. ``module`` has the ``serve`` that answers.
    """

    def __init__(self, *command: str, module: str) -> None:
        ours, theirs = socket.socketpair()
        boot = _BOOT.format(init=str(_PACKAGE / "__init__.py"), folder=str(_PACKAGE), module=module)
        environ = {name: value for name, value in os.environ.items() if name != "KVLEDGER_DIR"}
        self._folder = temporary.folder("kvledger-vllm-")
        """Where the process and its forks put what is temporary: they are killed, and can't remove it."""
        self._process = subprocess.Popen(
            [*command, "-c", boot],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environ | ONE_THREAD | {"VLLM_LOGGING_LEVEL": "ERROR", "TMPDIR": self._folder.name},
            start_new_session=True,
        )
        theirs.close()
        self.line = Line(ours)
        """Asks it, and reads its answers."""
        self._asking = threading.Lock()
        """Held from a question to its answer."""

    def fork(self, seconds: float) -> tuple[Line, int] | None:
        """A worker that has imported what this process has, and its process id; None if it can't fork."""
        ours, theirs = socket.socketpair()
        with theirs, self._asking:
            answer = self.line.ask(b"", seconds, theirs.fileno())
        if not answer or answer == b"0":
            ours.close()
            return None
        return Line(ours), int(answer)

    def stop(self) -> None:
        """End the process and all its forks, which are one process group."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.line.close()
        self._folder.cleanup()


class Worker:
    """One worker process; another takes its place after a job that never ends."""

    def __init__(self, command: Sequence[str], module: str, parent: VllmProcess) -> None:
        self._command, self._module, self._parent = command, module, parent
        self.own: VllmProcess | None = None
        """The worker's process where the parent can't fork."""
        self._line: Line | None = None
        """Talks to the worker; None while there is none."""
        self.pid = 0
        """The fork's process id; 0: there is none."""

    def ask(self, line: bytes, seconds: float) -> bytes | None:
        """The answer to a job; None: the worker ended, or took longer."""
        if self._line is None:
            forked = self._parent.fork(START_SECONDS)
            if forked is not None:
                self._line, self.pid = forked
            else:
                self.own = VllmProcess(*self._command, module=self._module)
                self._line = self.own.line
                seconds += START_SECONDS
        found = self._line.ask(line, seconds)
        if found is None:
            self.stop()
        return found

    def stop(self) -> None:
        """End the process."""
        if self.own is not None:
            self.own.stop()
        elif self._line is not None:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)  # its parent keeps the process id until it ends itself
            self._line.close()
        self.own = self._line = None


class Workers:
    """The workers under one interpreter, each started when first needed, and the process they fork from."""

    def __init__(self, command: Sequence[str], count: int, module: str) -> None:
        self.parent = VllmProcess(*command, module=module)
        """The process that has imported vLLM, which they fork from."""
        self.all = [Worker(command, module, self.parent) for _ in range(count)]
        """The workers, idle or not."""
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        """Workers without a job."""
        for worker in self.all:
            self._idle.put(worker)

    def ask(self, line: bytes, seconds: float) -> bytes | None:
        """The answer of the next worker that is idle; None: it ended, or took longer."""
        worker = self._idle.get()
        try:
            return worker.ask(line, seconds)
        finally:
            self._idle.put(worker)

    def stop(self) -> None:
        """End all processes."""
        for worker in self.all:
            worker.stop()
        self.parent.stop()


def imported(*, v0: bool = False) -> str:
    """The version of vLLM, once the modules are imported that every job needs."""
    from ..engines import host_version

    if v0:  # in 0.9 under VLLM_USE_V1=0 no v1 scheduler can be built
        importlib.import_module("vllm.core.scheduler")
    else:
        from .engine_setup import EngineSetup, build_scheduler

        build_scheduler(EngineSetup())
    return host_version()


def serve_lines(answer: Callable[[bytes], bytes]) -> None:
    """Answer the lines from standard input, which is a socket, and fork when asked to, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = socket.socket(fileno=os.dup(0))
    buffer = b""
    while True:
        data, descriptor = _receive(server)
        if descriptor is not None:
            child = _fork()
            if child == 0:
                server.close()
                server, buffer = socket.socket(fileno=descriptor), b""
                continue
            os.close(descriptor)
            server.sendall(b"%d\n" % max(0, child))
            continue
        if not data:
            os._exit(0)
        buffer += data
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            server.sendall(answer(line) + b"\n")


def _fork() -> int:
    """Like os.fork; -1 where other threads run. Those of jemalloc may: it makes its state right in a fork."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if sum(not name.startswith(FORKED_BY_ITSELF) for name in names) != 1:
        return -1
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages that it shares
    return os.fork()


def _receive(server: socket.socket) -> tuple[bytes, int | None]:
    """What came, and the descriptor that came with it."""
    data, descriptors, _, _ = socket.recv_fds(server, _READ_BYTES, 1)
    return data, descriptors[0] if descriptors else None
