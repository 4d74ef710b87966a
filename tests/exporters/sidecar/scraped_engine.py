"""Runs the demo's workload on the real engine and writes, every few steps, what its `/metrics` would say.

`python -m tests.exporters.sidecar.scraped_engine FOLDER`: the journal goes to KVLEDGER_DIR, and FOLDER gets
`scrapes.jsonl`, one `[began, ended, text]` a line.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from kvledger.audit.demo import workload
from kvledger.audit.demo.engine import run_waves, settle_environment, start_engine

EVERY_STEPS = 7
SEED = 3


def main(folder: Path) -> None:
    settle_environment(in_process=True)
    from prometheus_client import generate_latest

    llm = start_engine(folder, SEED)
    with (folder / "scrapes.jsonl").open("w") as out:

        def scrape() -> None:
            began = time.time()
            text = generate_latest().decode()
            out.write(json.dumps([began, time.time(), text]) + "\n")

        scrape()
        step, steps = llm.llm_engine.step, 0

        def stepped() -> Any:
            nonlocal steps
            outputs = step()
            steps += 1
            if not steps % EVERY_STEPS:
                scrape()
            return outputs

        llm.llm_engine.step = stepped
        run_waves(llm, workload.DEFAULT_WAVES, SEED, sys.stderr)
        scrape()
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
