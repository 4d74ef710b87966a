"""Times `kvledger whatif` on a long journal of level blocks, with and without its kept rows.

    python benchmarks/whatif.py DIR [--requests N] [--samples 0.1,0.01]

The real scheduler runs conversations without a model: system prompts of uneven popularity, prompts of 64 to
1,500 tokens, a pool of 8,000 blocks. Its journal is left in DIR and used again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # `python -m benchmarks.whatif` adds this itself

from benchmarks import page

from kvledger.audit.replay.parallel import size_bytes
from kvledger.exporters.facts.compact import compact
from kvledger.exporters.facts.kept import folder_of, load, place

TABLES = ("admissions", "block_operations", "block_use")
BLOCKS = 8000
CONVERSATIONS = 400
PROMPT_TOKENS = 1500
SYSTEMS = 20
VOCABULARY = 30_000
FIRST = 10
"""Token ids below this mean something to the driver."""


def prompts(requests: int) -> Iterator[list[int]]:
    """Prompts of conversations that go on, stop, and share system prompts of uneven popularity."""
    rng = random.Random(11)

    def tokens(count: int) -> list[int]:
        return rng.choices(range(FIRST, VOCABULARY), k=count)

    systems = [tokens(rng.randrange(64, 600)) for _ in range(SYSTEMS)]
    weights = [1 / (rank + 1) for rank in range(SYSTEMS)]
    talks: list[list[int]] = []
    for _ in range(requests):
        if len(talks) < CONVERSATIONS or rng.random() < 0.3:
            talks.append(list(rng.choices(systems, weights)[0]))
        if len(talks) > CONVERSATIONS:
            talks.pop(rng.randrange(len(talks)))
        talk = rng.choice(talks)
        talk += tokens(rng.randrange(20, 300))
        yield list(talk[:PROMPT_TOKENS])
        if len(talk) > PROMPT_TOKENS:
            talks.remove(talk)


def record(folder: Path, requests: int) -> None:
    """Run the scheduler; its journal goes below ``folder``."""
    from benchmarks.scheduler import observe

    from kvledger.audit.conformance.driver import Driver, EngineSetup

    os.environ["KVLEDGER_JOURNAL_BYTES"] = str(8 << 30)
    setup = EngineSetup(blocks=BLOCKS + 1, max_running=64, max_batched_tokens=4096)
    driver = Driver(setup, record=False)
    observer, recorder = observe(driver.scheduler, folder, "blocks")
    for number, prompt in enumerate(prompts(requests)):
        driver.add(str(number), prompt, 4 + number % 60)
        driver.step()
    driver.run()
    observer.stop("exit")
    recorder.close()


class Timed(NamedTuple):
    """A command, its wall and CPU seconds, and the most memory of its process in MiB."""

    command: str
    wall: float
    cpu: float
    mebibytes: int
    answer: Any


def timed(name: str, words: Sequence[str], folder: Path) -> Timed:
    """Run `kvledger whatif` on the journal."""
    command = [sys.executable, "-m", "kvledger", "whatif", *words, "--format", "json", str(folder)]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        answer = json.loads(process.stdout.read())
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = status
    wall = time.monotonic() - began
    row = Timed(name, wall, used.ru_utime + used.ru_stime, used.ru_maxrss // 1024, answer["engines"][0])
    print(f"{row.command}: {row.wall:.1f} s, {row.cpu:.1f} s CPU, {row.mebibytes} MiB", file=sys.stderr)
    return row


def difference(one: Any, exact: Any) -> float:
    """The largest difference between two curves, in points."""
    shares = {point["blocks"]: point["hit_share"] for point in exact["curve"]}
    both = [(point["hit_share"], shares.get(point["blocks"])) for point in one["curve"]]
    return max(100 * abs(share - other) for share, other in both if other is not None)


def measure(journal: Path, samples: Sequence[str]) -> tuple[list[Timed], str]:
    """The rows, and a sentence about the bytes."""
    shutil.rmtree(folder_of(journal), ignore_errors=True)
    rows = [timed("whatif -j 1, without kept rows", ("-j", "1"), journal)]
    written = in_process("--keep", journal)
    seconds, requests, size = float(written["seconds"]), int(written["requests"]), size_bytes(journal)
    kept = ", ".join(f"{written[name] / requests:,.0f} in {name}" for name in TABLES)
    rows.append(timed("whatif -j 1", ("-j", "1"), journal))
    for share in samples:
        words = ("--sample", share, "-j", "1")
        rows.append(timed(f"whatif -j 1 --sample {share}", words, journal))
    rows.append(timed("whatif -j 2", ("-j", "2"), journal))
    equal = rows[0].answer == rows[1].answer == rows[-1].answer
    return rows, (
        f"{requests:,} requests: the journal has {size / requests:,.0f} bytes a request, and kept rows "
        f"{kept}; compact took {seconds:.1f} CPU seconds. Results from the journal and from the rows are "
        f"{'equal' if equal else 'NOT equal'}."
    )


def keep(journal: Path) -> dict[str, float]:
    """Compact the journal: requests, CPU seconds, and bytes of the tables about blocks."""
    requests = compact(journal).requests
    session = load(place(journal))
    assert session is not None
    files = [*session.files, *session.tail]
    sizes = {name: sum(file.bytes for file in files if file.table == name) for name in TABLES}
    return {"requests": requests, "seconds": time.process_time(), **sizes}


def in_process(option: str, *words: object) -> Any:
    """Run this program in a process of its own, whose memory is not counted with that of later ones."""
    command = [sys.executable, __file__, option, *map(str, words)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def table(rows: Sequence[Timed]) -> str:
    """The table, with the errors of samples."""
    cells = []
    for row in rows:
        calibration = row.answer["calibration"]
        points = calibration["sample_points"]
        cells.append(
            (
                row.command,
                f"{row.wall:.1f}",
                f"{row.cpu:.1f}",
                f"{row.mebibytes:,}",
                f"{calibration['residual_points']:+.2f}",
                "" if points is None else f"{points:+.2f}",
                "" if points is None else f"{difference(row.answer, rows[0].answer):.2f}",
            )
        )
    headings = (
        "command",
        "seconds",
        "CPU seconds",
        "MiB",
        "residual",
        "sample's error",
        "largest difference",
    )
    return page.table(headings, cells)


def main() -> int:
    """Record the journal if it is not there, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--samples", default="0.1,0.01")
    parser.add_argument("--record", action="store_true", help="only write the journal")
    parser.add_argument("--keep", action="store_true", help="only compact the journal DIR")
    arguments = parser.parse_args()
    if arguments.keep:
        print(json.dumps(keep(arguments.folder)))
    elif arguments.record:
        record(arguments.folder, arguments.requests)
        print("{}")
    else:
        if not list(arguments.folder.glob("engine-*")):
            in_process("--record", arguments.folder, "--requests", arguments.requests)
        [journal] = arguments.folder.glob("engine-*")
        rows, sentence = measure(journal, arguments.samples.split(","))
        print(f"{page.machine()}\n\n{table(rows)}\n\n{sentence}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
