"""Runs vLLM's own tests of scheduler, prefix cache, KV managers and connectors with and without kvledger.

Usage: make proof NAME=upstream ARGS="[--write] [--level=content] [NAME...]"

Runs on the releases in RELEASES, or on those named.

Downloads the source distribution of each release, keeps its tests/ in .upstream, and runs some of the
files under `pytest --kvledger`, then the tests that failed once more as they are. Pytest's output is in
.upstream/RELEASE-kvledger.log and .upstream/RELEASE.log. Exits with 1 if a test passes without kvledger,
fails with it, and is neither in EXCLUDED nor in TRUE. Nothing is copied into this repository, and the tests
here do not include it. `--write` writes docs/reference/upstream-tests.md; a release that is not run
keeps its rows.

With `--level=content` the files that build schedulers or engines run at level `content`
(`upstream_contents.py`), on CONTENT_RELEASES, and `--write` writes the section of docs/reference/upstream-
tests.md on that level. With `--level=checks` the exported checks take the place of kvledger
(`upstream_checks.py`); their outcomes go into docs/reference/mutants.md.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from releases import BIN, MATRIX, build, environ

ROOT = Path(__file__).resolve().parents[2]
UPSTREAM = (ROOT / ".upstream").resolve()
HUB = UPSTREAM / "hub"
ENGINES_HUB = UPSTREAM / "hub-engines"
"""A cache with weights, which `upstream_models.py` fills."""
PAGE = ROOT / "docs" / "reference" / "upstream-tests.md"
RELEASES = [name for name in reversed(MATRIX) if not name.endswith("-v0") and "lmcache" not in name]
CONTENT_RELEASES = ("0.33.0", "0.32.0")
HEADING = "## At level `content`"
COUNTS = "kvledger.contents"
"""The property of a test with its counts, which `upstream_contents.py` adds."""
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

WITHOUT_SCHEDULER = (
    "v1/core/test_prefix_caching.py",
    "v1/core/prefix_cache",
    "v1/core/test_kv_cache_utils.py",
    "v1/core/test_single_type_kv_cache_manager.py",
)
"""Files that build KV cache managers only, which have no KV."""
LONG = ("v1/core/test_priority_scheduler_random.py",)
"""Files with so many steps that they take as long as all others; writing their KV takes tens of minutes."""
LONG_RELEASES = ("0.33.0", "0.32.0")
"""The releases that run them, at level `blocks`."""

ENGINE_FILES = (
    "v1/core/test_reset_prefix_cache_e2e.py",
    "v1/e2e/test_cpu_spec_decode.py",
    "v1/e2e/general/test_min_tokens.py",
)
"""Files that build whole engines, which run at level `content` in the release that has kernels for a CPU."""
ENGINES_RELEASE = "0.32.0"
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
"""The variables with which an engine and its worker run in the process of the test."""

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
    "test_priority_scheduling_blast": "has images and an encoder budget of no token, so that its engine "
    "really stands still from step 1,976 on; with five drafts it also returns one token too many",
    "test_async_load_does_not_double_reserve_mamba_spec_blocks": "has a connector that loads the whole "
    "prompt of a model with states; the last token is computed again from a state that has it already, which "
    "is why NIXL leaves this token out",
}
"""Beginnings of the names of tests that forge an engine's state, and what they forge."""

TRUE = {
    "test_external_prefix_cache_metrics": "until 0.17.0 the engine counts whole blocks of an asynchronous "
    "load as computed, also where the connector promised a part of a block (`tokens/balance`)",
    "test_invalid_blocks_evicted_prevents_cache_pollution": "until 0.19.1 the engine reports the tokens of a "
    "load that failed as local hits (`tokens/set-once`)",
    "test_sync_fail_invalid_blocks_evicted": "the same",
    "test_error_propagation_sync_load": "the same",
}
"""Beginnings of the names of tests in which the engine is wrong, and how."""

OPTIONS = {
    "": (),
    "blocks": ("--kvledger=blocks",),
    "content": ("--kvledger=blocks", "-p", "upstream_contents"),
    "checks": ("-p", "upstream_checks"),
}
"""Pytest's options, by level."""

SUFFIX = {"": "", "blocks": "-kvledger", "content": "-content", "checks": "-checks"}
"""What the names of logs end with, by level."""

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
    """Those that passed with kvledger, or else without."""
    passed_under: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    """At level `content`: schedulers and hit blocks, by what was found."""

    def as_json(self) -> list[object]:
        """The fields in their order."""
        return [self.release, self.file, sorted(self.passed), sorted(self.passed_under), self.counts]

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


Passed = dict[str, tuple[set[str], "Counter[str]"]]
"""By file: the names of the tests that passed, and the sums of their counts."""


def passed(
    release: str, files: Sequence[str], level: str = "", *, engines: bool = False, memory: str = ""
) -> Passed:
    """The tests that pass, by file; all in one process, which imports vLLM once.

    ``engines``: the files build whole engines. ``memory``: a folder where pytest keeps which tests fail; only
    those that failed before are run, if there are any.
    """
    folder = sources(release)
    variables = environ(release) | {"HF_HUB_CACHE": str(HUB), "CUDA_VISIBLE_DEVICES": ""}
    if engines:
        variables |= IN_PROCESS | {"HF_HUB_CACHE": str(ENGINES_HUB)}
    path = [variables.get("PYTHONPATH", ""), str(folder), str(ROOT / "src"), str(Path(__file__).parent)]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [str(BIN / "python"), "-m", "pytest", "-q", "-W", "ignore", "--durations=20"]
        command += ["--confcutdir", str(folder / "tests" / "v1")]  # a conftest.py above needs a device
        command += ["-o", f"cache_dir={memory or scratch}", "--last-failed"]
        command += ["-c", os.devnull, "--rootdir", str(folder)]
        command += ["--continue-on-collection-errors", f"--junitxml={report}", *OPTIONS[level]]
        command += [f"tests/{file}" for file in files]
        log = UPSTREAM / f"{release}{'-engines' if engines else ''}{SUFFIX[level]}.log"
        with log.open("w") as output:
            subprocess.run(command, cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT)
        if not report.exists():
            last = (log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
            sys.exit(f"kvledger: {release}: {last}")
        found = read_report(report, files)
    return found


def read_report(report: Path, files: Sequence[str]) -> Passed:
    """What a report of pytest in JUnit's format says of the tests of these files."""
    found: Passed = {file: (set(), Counter()) for file in files}
    for case in ElementTree.parse(report).iter("testcase"):
        where = case.get("classname", "").replace(".", "/")
        file = next((f for f in files if where.startswith("tests/" + f.removesuffix(".py"))), None)
        if file is None:
            continue
        names, counts = found[file]
        for property in case.iter("property"):
            if property.get("name") == COUNTS:
                counts.update(json.loads(property.get("value", "{}")))
        if all(child.tag in OUTPUT for child in case):
            names.add(f"{case.get('classname', '')}::{case.get('name', '')}")
    return found


def run(release: str, level: str) -> list[Outcome]:
    """Run every file that the release has, without and with kvledger, and print the totals."""
    files = [file for file in FILES if (sources(release) / "tests" / file).exists()]
    files = [file for file in files if level == "blocks" or file not in WITHOUT_SCHEDULER]
    files = [file for file in files if (level == "blocks" and release in LONG_RELEASES) or file not in LONG]
    models()
    print(f"{release} at level {level} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as memory:
        observed = passed(release, files, level, memory=memory)
        if not any(names for names, _ in observed.values()):
            sys.exit(f"kvledger: {release}: no test passed; see {UPSTREAM}/{release}{SUFFIX[level]}.log.")
        alone = passed(release, files, memory=memory)
    outcomes = [Outcome(release, file, alone[file][0] | observed[file][0], *observed[file]) for file in files]
    if level == "content" and release == ENGINES_RELEASE:
        outcomes += run_engines(release)
    print(_row(release, ALL, outcomes, level == "content"), file=sys.stderr, flush=True)
    kept(release, level).write_text(json.dumps([outcome.as_json() for outcome in outcomes]))
    return outcomes


def kept(release: str, level: str) -> Path:
    """The file with the outcomes of the last run of a release."""
    return UPSTREAM / f"{release}{SUFFIX[level]}.json"


def last_outcomes(names: Sequence[str], level: str) -> list[Outcome]:
    """The outcomes of the last runs of these releases, as far as they are kept."""
    files = [kept(name, level) for name in names]
    rows = [row for file in files if file.exists() for row in json.loads(file.read_text())]
    return [
        Outcome(release, file, set(passed), set(passed_under), Counter(counts))
        for release, file, passed, passed_under, counts in rows
    ]


def run_engines(release: str) -> list[Outcome]:
    """Run the files that build whole engines, without and with kvledger."""
    if not ENGINES_HUB.exists():
        command = [str(BIN / "python"), str(Path(__file__).with_name("upstream_models.py")), str(ENGINES_HUB)]
        subprocess.run(command, check=True)
    alone = passed(release, ENGINE_FILES, engines=True)
    observed = passed(release, ENGINE_FILES, "content", engines=True)
    return [Outcome(release, file, alone[file][0], *observed[file]) for file in ENGINE_FILES]


def table(outcomes: Sequence[Outcome], old: str = "") -> list[str]:
    """The table, and the excluded tests with the reasons.

    Releases without outcomes keep the rows and reasons that they have in ``old``.
    """
    counted = any(outcome.counts for outcome in outcomes)
    columns = ["release", "tests", "pass without kvledger", "pass with kvledger", "excluded", "found"]
    columns += CONTENT_COLUMNS if counted else []
    rows: dict[str, str] = {}
    for release in RELEASES:
        mine = [outcome for outcome in outcomes if outcome.release == release]
        kept = [line for line in old.splitlines() if line.startswith(f"| {release} |") and not mine]
        rows |= {line: ALL if ALL in line else "" for line in kept}
        rows |= {_row(release, f"`{each.file}`", [each], counted): "" for each in mine if each.passed}
        rows |= {_row(release, ALL, mine, counted): ALL} if mine else {}
    head = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    totals, files = ([line for line, of in rows.items() if of == which] for which in (ALL, ""))
    lost = [bare(name) for outcome in outcomes for name in outcome.lost]
    excluded = _known(EXCLUDED, lost, old)
    forged = ["Excluded tests forge a state that no engine produces:", "", *excluded, ""]
    true = [] if counted else ["In the tests found, the engine is wrong:", "", *_known(TRUE, lost, old), ""]
    return [*head, *totals, "", *forged, *true, "By file:", "", *head, *files, ""]


def _known(tests: Mapping[str, str], lost: Sequence[str], old: str) -> list[str]:
    """A line for each of these tests that is among the ``lost`` ones or has one in ``old``."""
    return [
        f"- `{begin}`: {why}"
        for begin, why in tests.items()
        if f"- `{begin}`" in old or any(name.startswith(begin) for name in lost)
    ]


ALL = "**all**"
"""The name of the row with a release's sums."""
CONTENT_COLUMNS = [
    "schedulers with checked contents",
    "blocks sealed",
    "hit blocks verified",
    "hit blocks changed",
]


def _row(release: str, name: str, outcomes: Sequence[Outcome], counted: bool) -> str:
    alone = sum(len(outcome.passed) for outcome in outcomes)
    under = sum(len(outcome.passed & outcome.passed_under) for outcome in outcomes)
    found = sum(len(outcome.unexpected) for outcome in outcomes)
    excluded = sum(len(outcome.lost) for outcome in outcomes) - found
    cells = [release, name, *map(str, (alone, under, excluded, found))]
    counts: Counter[str] = sum((outcome.counts for outcome in outcomes), Counter())
    if counted:
        cells += [f"{counts[key]:,}" for key in ("watched", "sealed", "verified", "differed")]
    return f"| {' | '.join(cells)} |"


def page(old: str, level: str, outcomes: Sequence[Outcome]) -> str:
    """The page with the part of this level in place of the old one."""
    blocks, _, contents = old.partition(f"{HEADING}\n")
    lines = table(outcomes, blocks if level == "blocks" else contents)
    if level == "blocks":
        blocks = "\n".join([*WORDS, "", *lines, *([""] if contents else [])])
    else:
        contents = "\n".join(["", *CONTENT_WORDS, "", *lines])
        blocks = blocks.rstrip("\n") + "\n\n"
    return f"{blocks}{HEADING}\n{contents}" if contents else blocks


WORDS = (
    "# vLLM's own tests",
    "",
    "vLLM's tests of its scheduler, prefix cache, KV cache managers and connectors, as the source",
    "distribution of each release has them, under `pytest --kvledger`. The tests that fail are run once more",
    "without it; most fail there too, for want of a device or a model. A test that passes only without",
    "kvledger is *excluded* if it forges a state that no engine produces, and *found* if not.",
    "`test_priority_scheduler_random.py`, which takes as long as all others, runs on",
    f"{' and '.join(LONG_RELEASES)} only. `make proof NAME=upstream ARGS=--write` writes this page; with",
    "the names of releases it runs those again.",
)

CONTENT_WORDS = (
    "The files that build schedulers, with the KV of their blocks checked. A scheduler without a worker",
    "gets a runner with KV caches and no model, which writes random KV at every position that a step",
    f"computes. The last files of {ENGINES_RELEASE} build whole engines, with tiny models that have random",
    "weights. Left out are the files without a scheduler, and test_priority_scheduler_random.py, in which",
    "writing the KV takes tens of minutes.",
    "Tried once with 0.32.0 and left out: vLLM's tests of its offloading managers, tiers and workers",
    "(`v1/kv_offload` without its shared memory region, and `v1/simple_kv_offload`). They build no",
    "scheduler and no model runner, so there is nothing to observe: 677 tests pass, with kvledger and",
    "without. The tests that move KV skip or fail on a CPU: `CPUOffloadingWorker` asserts that the",
    "tensors are on a GPU.",
    '`make proof NAME=upstream ARGS="--level=content --write"` writes this section.',
)


def main(arguments: Sequence[str]) -> int:
    level = next((word[8:] for word in arguments if word.startswith("--level=")), "blocks")
    every = list(CONTENT_RELEASES if level == "content" else RELEASES)
    names = [word for word in arguments if not word.startswith("--")] or every
    build([name for name in names if name != "0.32.0"])
    outcomes = [outcome for name in names for outcome in run(name, level)]
    print("\n".join(table(outcomes)))
    for outcome in outcomes:
        for name in outcome.unexpected:
            print(f"found: {outcome.release} {name}")
    if "--write" in arguments and level != "checks":
        old = PAGE.read_text() if PAGE.exists() else ""
        PAGE.write_text(page(old, level, last_outcomes(every, level)))
    known = tuple(TRUE)
    return 1 if any(not bare(name).startswith(known) for each in outcomes for name in each.unexpected) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
