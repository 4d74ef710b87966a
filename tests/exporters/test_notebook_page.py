"""docs/notebook.ipynb runs in a bare kernel, without ipywidgets, and shows what stands in it.

``python -m tests.exporters.test_notebook_page`` writes its outputs again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/notebook.ipynb"

RUN = """
import sys
import nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", record_timing=False).execute()
nbformat.write(notebook, sys.argv[2])
"""


def executed(folder: Path) -> dict[str, Any]:
    """The notebook as it runs beside the trace that it names, with Jupyter's packages below ``folder``."""
    packages = folder / "packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", packages]
    subprocess.run([*install, "nbclient", "nbformat", "ipykernel"], check=True, capture_output=True)
    paths = [str(packages), str(ROOT / "src"), str(ROOT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TZ": "UTC"}
    write = [sys.executable, "-m", "tests.simulated_trace", "300", "--engines", "2", "-o", "trace"]
    for command in (write, [sys.executable, "-c", RUN, PAGE, "run.ipynb"]):
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert 0 == ran.returncode, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "run.ipynb").read_text())
    return found


def shown(notebook: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Each cell of code, and the text that it shows."""
    texts = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            shown = [output.get("data", {}).get("text/plain", output) for output in cell["outputs"]]
            texts.append(("".join(cell["source"]), ["".join(text) for text in shown]))
    return texts


def test_the_notebook_shows_what_stands_in_it(tmp_path: Path) -> None:
    ran = executed(tmp_path)

    assert shown(json.loads(PAGE.read_text())) == shown(ran)
    assert {"text/html"} <= {
        kind for cell in ran["cells"] for output in cell.get("outputs", ()) for kind in output["data"]
    }
    assert (tmp_path / "report.html").stat().st_size > 10_000


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        made = executed(Path(name))
    made["metadata"] = {"kernelspec": made["metadata"]["kernelspec"]}
    PAGE.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")
