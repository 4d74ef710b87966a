"""Drives SGLang with loads, one after the other, and records each: ``python -m kvledger.audit.demo.sglang``.

It runs where SGLang's wheel is on the path. Each load runs in a fork of this process, because importing
SGLang takes longer than most loads. Its journal is made in ``$KVLEDGER_DIR``, as the plugin makes it; what
the client was told, and how the pool was left, is printed as one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from ...entry.plugin import observe
from ...errors import LedgerError
from ...planted.fault import planted
from ...planted.table import BY_NAME
from . import loads, loop
from .pool import sizes
from .run import DEFECT


def run(name: str, model: str, *, inject: bool = False) -> dict[str, Any]:
    """Drive one load with an observed scheduler; returns what is printed."""
    load, injected = loads.LOADS[name], contextlib.ExitStack()
    if inject:
        injected.enter_context(planted(BY_NAME[DEFECT]))
    if load.arguments.get("enable_hierarchical_cache"):
        loop.keep_host_copies_on_cpu()
    scheduler = loop.build(model, **load.arguments)
    observer: Any = observe(scheduler)
    if observer is None:
        raise LedgerError("The scheduler is not observed; the log says why.")
    plan = loop.Plan(scheduler)
    load.plan(plan)
    failed = ""
    try:
        plan.run()
    except Exception as error:  # of the engine: a fault that a load reproduces
        failed = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    observer.stop("detached")
    observer.log.sink.close()
    return {
        "load": name,
        "release": loop.version(),
        "journal": Path(observer.log.sink.folder).name,
        "failed": failed,
        "iterations": plan.iteration,
        "pool": sizes(scheduler),
        "told": {
            request_id: told._replace(output_ids=())._asdict() for request_id, told in plan.told.items()
        },
    }


def main() -> int:
    """Run the loads that are named; 1 if one could not be run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("load", nargs="+", choices=loads.LOADS)
    parser.add_argument("--model", required=True, help="a folder made by kvledger.audit.demo.model")
    parser.add_argument("--inject", action="store_true", help=f"put the fault {DEFECT} in")
    given = parser.parse_args()
    failed = 0
    for name in given.load:
        child = os.fork()
        if not child:
            code = 1
            try:
                print(json.dumps(run(name, given.model, inject=given.inject)), flush=True)
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        failed |= os.waitpid(child, 0)[1]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
