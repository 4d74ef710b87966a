"""What the hooks cost SGLang's event loop on a CPU, model included: `python benchmarks/sglang_loop.py`.

The engine is the real one (audit/demo/sglang) in a fork for each run, bare and observed in turns. CPU time of
the whole loop counts, with the recorder's thread; the model is tiny, so the scheduler's share is large.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.page import ROOT, table

RELEASE = "sglang-0.5.23"
ROUNDS = 5
KINDS = {
    "steady": "32 requests decode 400 tokens each",
    "churn": "1,600 requests of 8 outputs, 2 arrive in each step",
    "retraction": "192 requests in a pool in which they are retracted, prompts in chunks",
}
ARGUMENTS = {"max_running_requests": 32, "max_total_tokens": 16_384, "disable_overlap_schedule": False}


def plan_of(kind: str, plan: object) -> None:
    """Fill the plan of one run."""
    import random

    from kvledger.audit.demo.sglang.loop import Plan, request

    assert isinstance(plan, Plan)
    numbers = random.Random(1)
    requests, prompt, outputs, every = {
        "steady": (32, 16, 400, 0),
        "churn": (1_600, 16, 8, 0.5),
        "retraction": (192, 100, 60, 2),
    }[kind]
    for place in range(requests):
        tokens = [numbers.randrange(2, 500) for _ in range(prompt)]
        plan.messages[int(place * every)].append(request(f"r{place}", tokens, outputs))


def child(kind: str, model: str) -> None:
    """Run a kind bare and observed in turns, each in a fork, and print the CPU seconds of each run."""
    import time

    from kvledger.audit.demo.sglang import loop
    from kvledger.audit.entry.plugin import observe

    arguments = dict(ARGUMENTS)
    if kind == "retraction":
        arguments |= {"max_total_tokens": 900, "schedule_conservativeness": 0.05}
    for number in range(2 * ROUNDS + 2):
        observed = bool(number % 2) ^ bool(number // 2 % 2)
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            scheduler = loop.build(model, **arguments)
            observer = observe(scheduler) if observed else None
            plan = loop.Plan(scheduler)
            plan_of(kind, plan)
            began = time.process_time()
            plan.run()
            seconds = time.process_time() - began
            os.write(writer, json.dumps([observed, seconds, plan.iteration, observer is not None]).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as answer:
            said = answer.read()
        os.waitpid(pid, 0)
        if number > 1:  # the first of each warms the caches of the machine
            print(said, flush=True)


def main() -> None:
    """Print the table."""
    from releases import build, environ

    from kvledger.audit.demo.sglang.run import ENVIRON, write_endless_model

    build([RELEASE])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        write_endless_model(model)
        given = environ(RELEASE) | ENVIRON | {"KVLEDGER_DIR": folder}
        given["PYTHONPATH"] = os.pathsep.join((given["PYTHONPATH"], str(ROOT / "src")))
        for kind, says in KINDS.items():
            command = [sys.executable, __file__, kind, str(model)]
            done = subprocess.run(command, env=given, stdout=subprocess.PIPE, text=True, check=True)
            runs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
            bare = [seconds for observed, seconds, *_ in runs if not observed]
            seen = [seconds for observed, seconds, *_ in runs if observed]
            ratios = [one / other for one, other in zip(seen, bare, strict=True)]
            step = 1e3 * median(bare) / runs[0][2]
            rows.append((f"{kind}: {says}", f"{step:.2f}", f"{median(ratios):.4f}"))
    print(table((f"SGLang {RELEASE.removeprefix('sglang-')}", "bare, ms a step", "observed / bare"), rows))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child(*sys.argv[1:])
    else:
        main()
