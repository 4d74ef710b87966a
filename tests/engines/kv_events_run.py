"""A real engine that publishes its KV events, in a process of its own: shared prefixes, preemptions,
evictions and a reset. Prints what happened as JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.engines.content_run import engine, generate, prompts
from tests.scenarios.kv_stream import KEY


class Losing:
    """A subscription that loses some batches."""

    def __init__(self, source: Any, lost: set[int]) -> None:
        self._source, self._lost = source, lost

    def next(self) -> Any:
        """The next batch that is not lost."""
        message = self._source.next()
        return None if message is not None and message.sequence in self._lost else message

    def replayed(self, first: int) -> list[Any]:
        """Nothing: the publisher has no socket for this."""
        return []


def recorded(folder: Path, source: Any, endpoint: str, stop: threading.Event) -> tuple[Any, threading.Thread]:
    """A recorder that runs in a thread."""
    from kvledger.exporters.kv_events import EventRecorder, key

    recorder = EventRecorder(folder, source, key(), endpoint)
    thread = threading.Thread(target=recorder.run, args=(stop,))
    thread.start()
    return recorder, thread


def run(folder: Path, lost: set[int], ports: tuple[int, int]) -> dict[str, Any]:
    """Three waves and a reset, recorded once whole and once without the ``lost`` batches."""
    import kvledger
    from kvledger.exporters.kv_events import Subscription

    os.environ["KVLEDGER_EVENTS_KEY"] = KEY
    endpoint, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    bound = [f"tcp://*:{port}" for port in ports]
    llm = engine(
        Path(tempfile.mkdtemp()),
        kv_events_config={
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": bound[0],
            "replay_endpoint": bound[1],
        },
    )
    stop = threading.Event()
    with kvledger.attach(llm, level="blocks") as audit:
        recorders = [recorded(folder / "whole", Subscription(endpoint, replay), endpoint, stop)]
        if lost:
            losing = Losing(Subscription(endpoint), lost)
            recorders.append(recorded(folder / "lossy", losing, endpoint, stop))
        time.sleep(1.0)
        generate(llm, prompts(24))
        llm.reset_prefix_cache()
        generate(llm, prompts(40)[24:])
        generate(llm, prompts(40)[:12], max_tokens=3)
        time.sleep(1.0)
    stop.set()
    for name in ("whole", "lossy"):
        if (folder / name).exists():
            audit.save(folder / name / "engine-1-1-0")
    for _, thread in recorders:
        thread.join()
    return {
        "sums": [vars_of(recorder.sums) for recorder, _ in recorders],
        "preemptions": audit.totals.preemptions,
        "verdict": audit.verdict,
    }


def vars_of(sums: Any) -> dict[str, int]:
    """The sums of a recording as a dict."""
    import msgspec

    return dict(msgspec.structs.asdict(sums))


def main() -> None:
    """``FOLDER``, the lost batches separated by commas, and two free ports."""
    from kvledger.audit.demo.engine import settle_environment

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    settle_environment(in_process=True)
    lost = {int(number) for number in sys.argv[2].split(",") if number}
    result = run(Path(sys.argv[1]), lost, (int(sys.argv[3]), int(sys.argv[4])))
    (Path(sys.argv[1]) / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
