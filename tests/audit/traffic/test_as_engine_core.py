"""What an engine core gives its scheduler and its requests, beside what our drivers give them.

A driver that leaves one of them at a default drives another engine than users run: of vLLM 0.33 with a
drafter the hash of a block covers the next token, too, and prompts that share 64 tokens hit 48.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import subprocess
from pathlib import Path

import pytest
from tests.releases import built
from tests.time_limits import RUN_HANGS

pytest.importorskip("vllm")

from kvledger.audit.traffic import engine_setup

ROOT = Path(__file__).parents[3]


def cores() -> dict[str, Path]:
    """The engine core's file of the release that is installed here, and of each one that was built."""
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.origin is not None
    here = {"installed": Path(found.origin).parent / "v1/engine/core.py"}
    return here | {
        path.parents[3].name: path for path in sorted(ROOT.glob(".releases/0.*/vllm/v1/engine/core.py"))
    }


def calls(path: Path, *names: str) -> list[ast.Call]:
    """The calls of functions with these names."""
    return [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names
    ]


@pytest.mark.parametrize("release", cores())
def test_a_scheduler_is_built_with_what_an_engine_core_gives_it(release: str) -> None:
    ours = inspect.getsource(engine_setup.build_scheduler)
    given = {
        keyword.arg or ""
        for call in calls(cores()[release], "Scheduler", "scheduler_cls")
        for keyword in call.keywords
    }

    assert given, "the engine core of this release builds its scheduler elsewhere"
    assert [] == [name for name in sorted(given) if f"{name}=" not in ours]


@pytest.mark.parametrize("release", cores())
def test_blocks_are_hashed_with_what_an_engine_core_gives_the_hasher(release: str) -> None:
    ours = inspect.getsource(engine_setup.block_hasher)
    for call in calls(cores()[release], "get_request_block_hasher"):
        settings = [
            ast.unparse(argument).removeprefix("vllm_config.").removeprefix("self.")
            for argument in [*call.args, *(keyword.value for keyword in call.keywords)]
        ]
        known = {"block_size", "hash_block_size", "scheduler_block_size", "caching_hash_fn"}
        assert [] == [name for name in settings if name not in known and name not in ours], settings


SHARING = """
from tests.scenarios.driving import start
import kvledger

audits = []
observe = lambda scheduler: audits.append(kvledger.attach(scheduler, level="blocks"))
driver = start(observe, drafts=1, drafter="eagle", blocks=200)
driver.add("a", 128, 4)
driver.run()
for shared in (64, 96, 97):
    driver.add(f"b{shared}", 128, 4, shares=("a", shared))
    driver.run()
audits[0].detach()
print(audits[0].verdict, *(audits[0].account(f"b{n}").settlements[0].local for n in (64, 96, 97)))
"""


@pytest.mark.releases
def test_with_a_drafter_prompts_hit_what_they_hit_in_an_engine_core_of_0_33() -> None:
    releases = built("0.33.0")
    completed = subprocess.run(
        [releases.BIN / "python", "-c", SHARING],
        env=releases.environ("0.33.0"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_HANGS,
        check=True,
    )

    assert "clean 48 80 96" == completed.stdout.splitlines()[-1]
