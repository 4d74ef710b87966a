"""The three processes of a deployment, run as an operator runs them: server, sidecar, Prometheus."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests import tools

from kvledger.audit.demo.model import write_model

ROOT = Path(__file__).parents[2]
START_SECONDS = 900.0
SETTLE_SECONDS = 300.0
"""A server that takes longer to start, or to show what it did, hangs."""

BLOCK_TOKENS = 32
BLOCKS = 11
"""Of which one is the null block: too few for the requests that run at once."""

RUNNING_REQUESTS = 6


class Server:
    """A process that serves HTTP on its own port, from :meth:`start` to :meth:`kill`."""

    ready = "/"

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """The command line."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Additional environment variables."""
        return {}

    def start(self) -> None:
        """Start the process and wait until it is ready."""
        self.launch()
        wait_until(self.answers, START_SECONDS, self.last_words)

    def launch(self) -> None:
        """Start the process; :meth:`answers` tells when it is ready."""
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("KVLEDGER", "VLLM"))
        }
        paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                env=inherited | {"PYTHONPATH": paths} | self.environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def answers(self) -> bool:
        """Whether the process is ready. Fails if the process has ended."""
        process = self._process
        assert process is not None and process.poll() is None, self.last_words()
        try:
            with urllib.request.urlopen(self.address + self.ready, timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """`kill -9` the whole process group: an engine's core is a separate process."""
        if self._process is not None:
            os.killpg(self._process.pid, 9)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Send SIGTERM and wait for the end."""
        self.terminate()
        assert self._process is not None
        self._process.wait(START_SECONDS)
        self._process = None

    @property
    def pid(self) -> int:
        """The id of the process that was started."""
        assert self._process is not None
        return self._process.pid

    def terminate(self, *, group: bool = False) -> None:
        """Send SIGTERM to the process that was started, or to its whole process group."""
        assert self._process is not None
        (os.killpg if group else os.kill)(self._process.pid, 15)

    def last_words(self) -> str:
        """The end of the log."""
        return self._log.read_text(errors="replace")[-3000:]

    def get(self, path: str) -> Any:
        """Get a page, parsed if it is JSON."""
        with urllib.request.urlopen(self.address + path, timeout=30) as response:
            body = response.read().decode()
            return json.loads(body) if "json" in response.headers.get("Content-Type", "") else body


class Engine(Server):
    """vLLM's OpenAI-compatible server with a tiny model; the plugin is in its EngineCore process."""

    ready = "/health"

    def __init__(self, folder: Path, journals: Path, name: str = "engine") -> None:
        super().__init__(folder, name)
        self._model = write_model(folder / "model", 0)
        self._journals = journals

    def command(self) -> list[str]:
        transfer = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(self.folder / "store")},
        }
        options = {
            "model": self._model,
            "served-model-name": "tiny",
            "dtype": "float32",
            "block-size": BLOCK_TOKENS,
            "num-gpu-blocks-override": BLOCKS,
            "max-model-len": 320,
            "max-num-seqs": RUNNING_REQUESTS,
            "max-num-batched-tokens": 192,
            "distributed-executor-backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
            "kv-transfer-config": json.dumps(transfer),
            "host": "127.0.0.1",
            "port": self.port,
        }
        asked = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        return [*server, "--skip-tokenizer-init", "--enforce-eager", *asked]

    def environment(self) -> dict[str, str]:
        return {
            "KVLEDGER_DIR": str(self._journals),
            "KVLEDGER_GROUP": "^([a-z]+)-",  # one group, cmpl
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def complete(self, prompt: list[int], output_tokens: int, timeout: float = 120) -> bool:
        """Request a completion; return whether it succeeded. A server that ends answers 200 with an abort."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            self._ask(connection, prompt, output_tokens, stream=False)
            response = connection.getresponse()
            answer = response.read()
            return response.status == 200 and json.loads(answer)["choices"][0]["finish_reason"] != "abort"
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def give_up(self, prompt: list[int], output_tokens: int) -> None:
        """Send a request and disconnect after the start of the answer: the server aborts the request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        self._ask(connection, prompt, output_tokens, stream=True)
        connection.getresponse().read(1)
        connection.close()

    def reset_cache(self) -> None:
        """Empty the engine's own prefix cache."""
        asked = urllib.request.Request(self.address + "/reset_prefix_cache", method="POST")
        with urllib.request.urlopen(asked, timeout=30):
            pass

    def _ask(
        self, connection: http.client.HTTPConnection, prompt: list[int], output_tokens: int, *, stream: bool
    ) -> None:
        asked = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "detokenize": False,
            "stream": stream,
        }
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(asked), headers)


class Sidecar(Server):
    """`kvledger serve` for the engine; it also scrapes the engine's own metrics if there is one."""

    ready = "/-/ready"

    def __init__(self, folder: Path, journals: Path, engine: Engine | None = None) -> None:
        super().__init__(folder, "sidecar")
        self._journals = journals
        self._engine = engine

    def command(self) -> list[str]:
        serve = [sys.executable, "-m", "kvledger", "serve", str(self._journals)]
        options = ["--web.listen-address", f"127.0.0.1:{self.port}"]
        if self._engine is not None:
            options += ["--engine-url", f"{self._engine.address}/metrics"]
        return [*serve, *options]


class Prometheus(Server):
    """Debian's Prometheus, scraping each of the ``jobs``, by its server, every second."""

    ready = "/-/ready"

    def __init__(self, folder: Path, jobs: Mapping[str, Server], rules: Path) -> None:
        super().__init__(folder, "prometheus")
        self._program = tools.debian("prometheus", "prometheus")
        self._configuration = folder / "prometheus.json"
        self._configuration.write_text(
            json.dumps(
                {
                    "global": {"scrape_interval": "1s", "evaluation_interval": "2s"},
                    "rule_files": [str(rules)],
                    "scrape_configs": [
                        {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{server.port}"]}]}
                        for job, server in jobs.items()
                    ],
                }
            )
        )

    def command(self) -> list[str]:
        return [
            str(self._program),
            f"--config.file={self._configuration}",
            f"--storage.tsdb.path={self.folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]

    def series(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """The instant vector of a query: labels and value."""
        answer = self.get(f"/api/v1/query?{urllib.parse.urlencode({'query': expr})}")
        return [(row["metric"], float(row["value"][1])) for row in answer["data"]["result"]]

    def value(self, expr: str) -> float | None:
        """The single value of a query; None without data."""
        series = self.series(expr)
        assert len(series) <= 1, (expr, series)
        return series[0][1] if series else None


def free_port() -> int:
    """A port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def lasting_port() -> int:
    """A port below those that the system gives to connections, for a server that binds it a minute later."""
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def wait_until(holds: Callable[[], bool], seconds: float, last_words: Callable[[], str] = str) -> None:
    """Return once the condition holds; fail with the end of the log after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, last_words()
        time.sleep(0.3)
