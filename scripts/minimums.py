"""Runs the tests of tables, SQL and foreign text with the lowest version of each dependency that is allowed.

Usage: python3 scripts/minimums.py [pytest's arguments]

`pyproject.toml` names lower bounds only, so an environment may have exactly these. They are installed into
build/minimums, which stays until pyproject.toml changes. vLLM and SGLang are not: `make releases` has those.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import environment

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "minimums"
PYTHON = FOLDER / "bin" / "python"
EXTRAS = ("analysis", "fleet", "otel", "web")
TOOLS = ("hypothesis>=6.100", "jsonschema>=4.23", "psutil>=5.9", "pytest>=8.2")
TESTS = (
    "tests/audit/test_foreign.py",
    "tests/exporters/facts/test_dataset.py",
    "tests/exporters/facts/test_query.py",
    "tests/exporters/test_kv_events.py",
    "tests/exporters/test_usage_logs.py",
)


def main() -> int:
    """Returns pytest's exit code."""
    stamp, key = FOLDER / "whole.stamp", hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if not environment.holds(stamp, key):
        shutil.rmtree(FOLDER, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", FOLDER], check=True)
        extras = [word for extra in EXTRAS for word in ("--extra", extra)]
        wanted = ["--resolution", "lowest-direct", "-r", "pyproject.toml", *extras, *TOOLS]
        command = [str(environment.PYTHON), "-m", "uv", "pip", "install", "--quiet", "--python", str(PYTHON)]
        subprocess.run([*command, *wanted], cwd=ROOT, env=environment.uv_environ(), check=True)
        stamp.write_text(key)
    environ = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    tests = [str(PYTHON), "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, *sys.argv[1:]]
    return subprocess.run(tests, cwd=ROOT, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
