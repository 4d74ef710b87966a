"""README.md and docs/questions.md: what they show runs in a fresh folder, and prints what they show."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.whole_engine
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TOUR = "/tmp/tour"

BLOCKS = re.findall(r"(?:^    .*\n)+", README, re.MULTILINE)
SHOWN = [block for block in BLOCKS if "    $ kvledger" in block]
"""The blocks of the tour, in order: commands behind a dollar, each followed by what it prints."""

NEED_MORE = {
    "doctor": "an installed vLLM whose hooks are called",
    "audit follow": "runs until it is interrupted",
    "serve": "runs until it is interrupted; tests/serving",
    "deploy": "writes files for a host; tests/dashboards",
    "check": "a server; tests/serving",
    "repro DIR": "drives a scheduler for minutes; tests/repro",
    "conformance": "a connector; tests/conformance",
    "simulate": "drives a scheduler; tests/simulate",
    "diff": "two journals; tests/exporters/reports",
}
"""Commands of the table that this test does not run, and why."""


def run(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of README, whose folder /tmp/tour is below ``folder``."""
    words = shlex.split(line.replace(TOUR, str(folder / "tour")))
    assert "kvledger" == words[0]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "COLUMNS": "110"}
    environment |= {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    return subprocess.run(
        [sys.executable, "-m", "kvledger", *words[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def plain(line: str) -> str:
    """A line without what differs from run to run: numbers, and the digits that an id ends with."""
    line = re.sub(r"-[0-9a-f]{8}\b", "-ID", line)
    return " ".join(re.sub(r"[+-]?\d[\d,.:]*", "#", line).split())


@pytest.fixture(scope="module")
def tour(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    for block in SHOWN:
        for part in block.split("    $ ")[1:]:
            line, *expected = part.splitlines()
            if not line.startswith("kvledger"):
                continue  # `. .venv/bin/activate`
            done = run(folder, line)
            printed = plain(done.stdout)
            missing = [
                row for row in expected if row.strip() not in ("", "...") and plain(row) not in printed
            ]
            assert ([], "") == (missing, done.stderr.partition("Traceback")[1]), (line, done.stdout)
            assert done.returncode in (0, 1), (line, done.stderr)
    return folder


def test_the_tour_prints_what_readme_shows(tour: Path) -> None:
    assert 3 <= len(SHOWN)
    assert (tour / "tour" / "journal").is_dir()


def in_the_table() -> list[str]:
    rows = re.findall(r"^\|[^|]*\|[^|]*\| `(kvledger [^`]*)`", README, re.MULTILINE)
    rows += re.findall(r"`(kvledger (?:explain|demo --inject list)[^`]*)`", README)
    return [row for row in rows if not any(row.startswith(f"kvledger {name}") for name in NEED_MORE)]


@pytest.mark.parametrize("line", in_the_table())
def test_each_command_of_the_table_answers_or_says_what_it_needs(tour: Path, line: str) -> None:
    """Of the tour's journal, which is of level tokens and has no time before."""
    line = line.replace("DIR", f"{TOUR}/journal").replace("select ...", "select count(*) from requests")
    done = run(tour, line.replace(" ID", " cold-bare-1").replace(" WORD", " life"))

    assert done.returncode in (0, 1, 2, 3), done.stderr
    assert "Traceback" not in done.stderr
    if done.returncode == 2:
        assert 1 <= len(done.stderr.strip().splitlines()) <= 3, done.stderr


def test_the_python_of_readme_runs(tmp_path: Path) -> None:
    """With a small real engine as ``llm``; each line behind a name prints."""
    [code] = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "attach" in block]
    told = f"""
{code}
print(audit.verdict, audit.violations, audit.totals.external, audit.coverage.words, sep="|")
print(audit.account("0").prompt_tokens)
"""
    *_, verdict, tokens = of_a_real_engine(tmp_path, told)
    assert verdict.startswith("clean|[]|0|at level tokens")
    assert "58" == tokens


def of_a_real_engine(folder: Path, code: str) -> list[str]:
    """What some Python prints, with a small real engine as ``llm``, and one of its prompts."""
    script = f"""
import os
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from pathlib import Path
from kvledger.audit.demo.engine import settle_environment
settle_environment(in_process=True)
from vllm import SamplingParams
from kvledger.audit.demo.engine import tiny_engine
from kvledger.audit.demo.model import write_model
llm = tiny_engine(write_model(Path("model"), 0), max_model_len=320, num_gpu_blocks_override=40)
generate = llm.generate
llm.generate = lambda prompts: generate(prompts, SamplingParams(max_tokens=4, detokenize=False))
import kvledger
prompts = [{{"prompt_token_ids": list(range(2, 60))}}]
{code}
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert 0 == done.returncode, done.stderr[-3000:]
    return done.stdout.splitlines()


QUESTIONS = (ROOT / "docs/questions.md").read_text()
SCHEDULER = """from vllm.v1.core.sched.scheduler import Scheduler


class MyScheduler(Scheduler):
    def update_from_output(self, *args):
        for request in self.running:
            if request.prefill_stats:
                request.prefill_stats.num_local_cached_tokens = -16
        return super().update_from_output(*args)
"""
ITS_TEST = """import my_module  # noqa: F401

from kvledger.audit.traffic.driver import Driver, tokens
from kvledger.audit.traffic.engine_setup import EngineSetup


def test_two_prompts():
    driver = Driver(EngineSetup(scheduler_class="my_module:MyScheduler"))
    for name in "ab":
        driver.add(name, tokens(40, name), 3)
    driver.run()
"""


def test_the_commands_of_the_page_of_questions_print_what_it_shows(tour: Path) -> None:
    """In a folder with the journal of the tour, and with a scheduler class of the user's and its test."""
    folder = tour / "tour"
    (folder / "my_module.py").write_text(SCHEDULER)
    (folder / "test_my_module.py").write_text(ITS_TEST)
    shown = re.findall(r"(?:^    \$ .*\n)(?:^    .*\n)+", QUESTIONS, re.MULTILINE)
    for part in "".join(shown).split("    $ ")[1:]:
        line, *expected = part.splitlines()
        program, *words = shlex.split(line)
        ran = subprocess.run(
            [sys.executable, "-m", program, *words],
            cwd=folder,
            env=os.environ | {"COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        printed = plain(ran.stdout)
        assert [] == [row for row in expected if plain(row) not in printed], (line, ran.stdout, ran.stderr)


def test_the_python_of_the_page_of_questions_prints_what_it_shows(tmp_path: Path) -> None:
    [(code, shown)] = re.findall(r"```python\n(.*?)```\n\n((?:    [^\n]*\n)+)", QUESTIONS, re.DOTALL)

    assert [row.strip() for row in shown.splitlines()] == of_a_real_engine(tmp_path, code)[-2:]
