"""Runs vLLM's own tests of scheduler, prefix cache, KV managers and connectors with and without kvledger.

Usage: python3 scripts/upstream_tests.py [--write] [NAME...]     the releases in RELEASES, or these

Downloads the source distribution of each release, keeps its tests/ in .upstream, and runs some of the
files twice: as they are, and under `pytest --kvledger`. Pytest's output is in .upstream/RELEASE.log and
.upstream/RELEASE-kvledger.log. Exits with 1 if a test passes without kvledger,
fails with it, and is not in EXCLUDED. Nothing is copied into this repository, and the tests here do not
include it. `--write` writes docs/upstream-tests.md.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from releases import BIN, build, environ

ROOT = Path(__file__).resolve().parent.parent
UPSTREAM = (ROOT / ".upstream").resolve()
HUB = UPSTREAM / "hub"
PAGE = ROOT / "docs" / "upstream-tests.md"
RELEASES = ("0.33.0", "0.32.0", "0.27.1", "0.23.0")
FILES = (
    "v1/core/test_scheduler.py",
    "v1/core/test_async_scheduler.py",
    "v1/core/test_prefix_caching.py",
    "v1/core/prefix_cache",
    "v1/core/test_kv_cache_utils.py",
    "v1/core/test_single_type_kv_cache_manager.py",
    "v1/core/test_deferred_block_free.py",
    "v1/core/test_swa_inflight_window_free.py",
    "v1/core/test_prefix_replay.py",
    "v1/core/test_priority_preemption_bug.py",
    "v1/core/test_priority_scheduler_random.py",
    "v1/kv_connector/unit/offloading_connector",
    "v1/kv_connector/unit/test_multi_connector.py",
    "v1/kv_connector/unit/test_lmcache_connector.py",
    "v1/kv_connector/unit/test_remote_prefill_lifecycle.py",
    "v1/kv_connector/unit/test_remote_decode_lifecycle.py",
    "v1/kv_connector/unit/test_kv_load_failure_recovery.py",
    "v1/kv_connector/unit/test_cache_pollution_prevention.py",
    "v1/kv_connector/unit/test_invalid_blocks_correctness.py",
    "v1/kv_connector/unit/test_error_propagation.py",
    "v1/streaming_input/test_scheduler_streaming.py",
)

OUTPUT = ("system-out", "system-err", "properties")
"""Children of a report's element for a test that passed."""

EXCLUDED = {
    "test_cache_hit_local_and_external": "forges cache hits of free blocks that never got a hash",
    "test_eagle_with_sliding_window": "removes a hash from the cache map",
    "test_different_block_size": "removes a hash from the cache map",
    "test_async_load_registers_immediately_without_deferral": "replaces two methods of the connector for one "
    "step, after observation has begun, so nobody sees the load",
    "test_spec_decoding_stats_empty_output": "returns no token for a decode step with drafts, which no model "
    "runner does; the engine then counts more computed tokens than the sequence has",
    "test_scheduler_reset_prefix_cache": "sets the engine's count of tokens in flight to 0",
    "test_priority_scheduling_blast[standard-5": "returns more tokens than the drafts and one more",
    "test_priority_scheduling_blast[preemption-5": "returns more tokens than the drafts and one more",
}
"""Beginnings of the names of tests that forge an engine's state, and what they forge."""

MODELS = {
    "facebook/opt-125m": ("opt", "OPTForCausalLM"),
    "facebook/opt-350m": ("opt", "OPTForCausalLM"),
    "Qwen/Qwen1.5-7B": ("qwen2", "Qwen2ForCausalLM"),
    "Qwen/Qwen3-0.6B": ("qwen3", "Qwen3ForCausalLM"),
    "Qwen/Qwen2.5-VL-3B-Instruct": ("qwen2", "Qwen2ForCausalLM"),  # the scheduler tests use text only
}
"""Models that the scheduler tests load. Each gets a configuration of its kind with default values, and no
weights."""


@dataclass
class Outcome:
    """The names of the tests of one file that passed in one release."""

    release: str
    file: str
    passed: set[str] = field(default_factory=set)
    passed_under: set[str] = field(default_factory=set)

    @property
    def lost(self) -> list[str]:
        return sorted(self.passed - self.passed_under)

    @property
    def unexpected(self) -> list[str]:
        """Tests that pass only without kvledger, although they forge nothing."""
        return [name for name in self.lost if not bare(name).startswith(tuple(EXCLUDED))]


def bare(name: str) -> str:
    """A test's name without its module and class."""
    return name.partition("::")[2]


def sources(release: str) -> Path:
    """The folder that contains a release's tests/; pip downloads it the first time."""
    folder = UPSTREAM / release
    if (folder / "tests").is_dir():
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        # The package can't be built here. pip unpacks the tests before it fails.
        command = [str(BIN / "python"), "-m", "pip", "download", "--quiet", "--no-clean", "--no-deps"]
        command += ["--no-binary", ":all:", "--no-build-isolation", "--dest", scratch, f"vllm=={release}"]
        subprocess.run(command, env=os.environ | {"TMPDIR": scratch}, capture_output=True)
        unpacked = next(Path(scratch).glob("pip-download-*/vllm_*/tests"), None)
        if unpacked is None:
            sys.exit(f"kvledger: pip can't download the source distribution of vllm {release}.")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(unpacked, folder / "tests")
    return folder


def models() -> None:
    """Fill a cache of the model hub with the configurations."""
    for name, (kind, architecture) in MODELS.items():
        configuration = {"model_type": kind, "architectures": [architecture], "torch_dtype": "float16"}
        folder = HUB / f"models--{name.replace('/', '--')}"
        for part, file, text in (
            ("snapshots/local", "config.json", json.dumps(configuration)),
            ("refs", "main", "local"),
        ):
            (folder / part).mkdir(parents=True, exist_ok=True)
            (folder / part / file).write_text(text)


def passed(release: str, files: Sequence[str], *options: str) -> dict[str, set[str]]:
    """The names of the tests that pass, by file; all in one process, which imports vLLM once."""
    folder = sources(release)
    variables = environ(release) | {"HF_HUB_CACHE": str(HUB), "CUDA_VISIBLE_DEVICES": ""}
    path = [variables.get("PYTHONPATH", ""), str(folder), str(ROOT / "src")]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [str(BIN / "python"), "-m", "pytest", "-q", "-W", "ignore", "--durations=20"]
        command += ["--confcutdir", str(folder / "tests" / "v1")]  # a conftest.py above needs a device
        command += ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder)]
        command += ["--continue-on-collection-errors", f"--junitxml={report}", *options]
        command += [f"tests/{file}" for file in files]
        log = UPSTREAM / f"{release}{'-kvledger' if options else ''}.log"
        with log.open("w") as output:
            subprocess.run(command, cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT)
        if not report.exists():
            last = (log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
            sys.exit(f"kvledger: {release}: {last}")
        names: dict[str, set[str]] = {file: set() for file in files}
        for case in ElementTree.parse(report).iter("testcase"):
            where = case.get("classname", "").replace(".", "/")
            file = next((f for f in files if where.startswith("tests/" + f.removesuffix(".py"))), None)
            if file is not None and all(child.tag in OUTPUT for child in case):
                names[file].add(f"{case.get('classname', '')}::{case.get('name', '')}")
    if not any(names.values()):
        sys.exit(f"kvledger: {release}: no test passed; see {log}.")
    return names


def run(release: str) -> list[Outcome]:
    """Run every file that the release has, without and with kvledger, and print the totals."""
    files = [file for file in FILES if (sources(release) / "tests" / file).exists()]
    models()
    print(f"{release} ...", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(2) as two:
        under = two.submit(passed, release, files, "--kvledger=blocks")
        alone = two.submit(passed, release, files)
        outcomes = [Outcome(release, file, alone.result()[file], under.result()[file]) for file in files]
    print(_row(release, "**all**", outcomes), file=sys.stderr, flush=True)
    return outcomes


def page(outcomes: Sequence[Outcome]) -> str:
    """The table, and the excluded tests with the reasons."""
    lines = [
        "| release | tests | pass without kvledger | pass with kvledger | excluded | found |",
        "|---|---|---|---|---|---|",
    ]
    for release in dict.fromkeys(outcome.release for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.release == release]
        lines += [_row(release, f"`{outcome.file}`", [outcome]) for outcome in mine if outcome.passed]
        lines.append(_row(release, "**all**", mine))
    lines += ["", "Excluded tests forge a state that no engine produces:", ""]
    lost = [name for outcome in outcomes for name in outcome.lost]
    used = {begin: why for begin, why in EXCLUDED.items() if any(bare(n).startswith(begin) for n in lost)}
    lines += [f"- `{begin}`: {why}" for begin, why in used.items()]
    return "\n".join(lines) + "\n"


def _row(release: str, name: str, outcomes: Sequence[Outcome]) -> str:
    alone = sum(len(outcome.passed) for outcome in outcomes)
    under = sum(len(outcome.passed & outcome.passed_under) for outcome in outcomes)
    found = sum(len(outcome.unexpected) for outcome in outcomes)
    excluded = sum(len(outcome.lost) for outcome in outcomes) - found
    return f"| {release} | {name} | {alone} | {under} | {excluded} | {found} |"


def main(arguments: Sequence[str]) -> int:
    names = [word for word in arguments if word != "--write"] or list(RELEASES)
    build([name for name in names if name != "0.32.0"])
    outcomes = [outcome for name in names for outcome in run(name)]
    text = page(outcomes)
    print(text)
    for outcome in outcomes:
        for name in outcome.unexpected:
            print(f"found: {outcome.release} {name}")
    if "--write" in arguments:
        PAGE.write_text(text)
    return 1 if any(outcome.unexpected for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
