"""Runs the notebooks of docs/notebooks from start to end. Takes the ``notebooks`` extra.

Run by name, which keeps it out of the ordinary suite: ``python -m pytest tests/docs/notebooks.py``.
"""

import re
import sys
from pathlib import Path

import nbclient
import nbformat
import program
import pytest
from data.text import small_text

CHECKOUT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((CHECKOUT / "docs" / "notebooks").glob("*.ipynb"))
SHOWN = {"first_run": ("finished, step 160", "train/loss"), "plan_your_run": ("GiB",)}


def test_every_notebook_is_checked() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(SHOWN)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.timeout(1200)
def test_a_notebook_runs_from_start_to_end(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # eight virtual devices are the suite's
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = str([cell.get("outputs", ()) for cell in notebook.cells])
    for text in SHOWN[path.stem]:
        assert text in shown, text
    nbformat.write(notebook, tmp_path / path.name)


@pytest.mark.timeout(1200)
def test_the_python_guide_runs(tmp_path: Path) -> None:
    """Every block of docs/guides/python.md, one after the other, as one script."""
    page = (CHECKOUT / "docs" / "guides" / "python.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    script = tmp_path / "guide.py"
    script.write_text("\n".join(blocks))
    small_text.write(tmp_path / "my_texts", files=40)
    found = program.execute(tmp_path, sys.executable, script.name, timeout=900)
    assert found.returncode == 0, f"{found.stdout}\n{found.stderr}"
