"""What LMCache's file store shows of a batch whose store failed in part (LMCache#4991).

Usage: python3 scripts/lmcache_stores.py [--write] [NAME...]     all releases of LMCache, or these

In each release the native client of its `fs_native` adapter stores two keys in one batch. The second one is
larger than the process may write, so the batch fails. Prints which keys a lookup then shows, also after the
store was opened again, and whether their bytes are those that were stored. `--write` writes
docs/reference/lmcache-stores.txt, which docs/reference/detection.md includes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from releases import BIN, MATRIX

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "docs" / "reference" / "lmcache-stores.txt"
PAGE = ROOT / "docs" / "reference" / "detection.md"
HEADING = "## Failed stores of LMCache"
NEXT = "## negative-local-hit on a whole engine"
PROBE = """
import importlib.util, resource, select, sys, torch
spec = importlib.util.spec_from_file_location("lmcache_fs", sys.argv[2])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
def done(client, future):
    while True:
        select.select([client.event_fd()], [], [], 5)
        for row in client.drain_completions():
            if row[0] == future:
                return row
def opened():
    return module.LMCacheFSClient(sys.argv[1], 1, "", False, 0)
keys, stored = ["m@0@0@aa", "m@0@0@bb"], [bytearray(b"a" * 500_000), bytearray(b"b" * 2_000_000)]
client = opened()
_, succeeded, why, _ = done(client, client.submit_batch_set(keys, [memoryview(each) for each in stored]))
first = done(client, client.submit_batch_exists(keys))[3]
client.close()
client = opened()
again = done(client, client.submit_batch_exists(keys))[3]
read = [bytearray(len(each)) for each in stored]
done(client, client.submit_batch_get(keys, [memoryview(each) for each in read]))
equal = [mine == theirs for mine, theirs in zip(stored, read) ]
print(f"store {'succeeded' if succeeded else 'failed'} ({why}); lookup {first}; after reopening {again}; "
      f"equal bytes {equal}")
"""


def compiled(release: str, scratch: Path) -> Path | None:
    """The compiled file store in the wheel of a release, which pip downloads."""
    wheel = [str(BIN / "python"), "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*wheel, "--dest", str(scratch), MATRIX[release].wheel], check=True, capture_output=True)
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as packed:
        names = [name for name in packed.namelist() if name.startswith("lmcache/lmcache_fs.")]
        return Path(packed.extract(names[0], scratch)) if names else None


def run(release: str) -> str:
    """What one release shows, in one line."""
    with tempfile.TemporaryDirectory() as scratch:
        native = compiled(release, Path(scratch))
        if native is None:
            return f"{release:17} has no compiled file store"
        store = Path(scratch) / "store"
        store.mkdir()
        command = [str(BIN / "python"), "-c", PROBE, str(store), str(native)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["it printed nothing"]
    return f"{release:17} {lines[-1]}"


def section() -> list[str]:
    """The section of docs/reference/detection.md."""
    return [
        HEADING,
        "",
        "[LMCache#4991](https://github.com/LMCache/LMCache/issues/4991): keys of a batch whose store",
        "failed stay visible to lookups. The compiled file store of each wheel (`fs_native`) stores two keys",
        "in one batch, and the second one can't be written. The first key stays visible and holds the bytes",
        "that were stored: a load of it has nothing that `content/transfer` could report. No engine was run,",
        "and no partly written key became visible here.",
        "",
        "Not run: the packed layouts that LMCache misreads since vLLM 0.26, in its in-process connector",
        "([#4463](https://github.com/LMCache/LMCache/issues/4463)) and with hybrid models",
        "([#4247](https://github.com/LMCache/LMCache/issues/4247)). Both were reported on GPUs.",
        "`python3 scripts/lmcache_stores.py --write` writes this section.",
        "",
        "```",
        KEPT.read_text().rstrip(),
        "```",
        "",
    ]


def main(arguments: Sequence[str]) -> int:
    every = [name for name in MATRIX if name.startswith("lmcache-") and "/" not in name]
    names = [word for word in arguments if not word.startswith("--")] or every
    rows = []
    for name in names:
        rows.append(run(name))
        print(rows[-1], flush=True)
    if "--write" in arguments and names == every:
        KEPT.write_text("\n".join([*rows, ""]))
        page = PAGE.read_text()
        start = page.find(f"{HEADING}\n")
        page = page if start < 0 else page[:start] + page[page.index(NEXT) :]
        PAGE.write_text(page.replace(NEXT, "\n".join([*section(), NEXT]), 1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
