"""``jaxtrain launch-scripts`` copies the launchers out of the package."""

import os
import subprocess
from pathlib import Path

import pytest

from jaxtrain import main


def test_scripts_are_copied_and_can_run(
    tmp_path: Path, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["launch-scripts", str(tmp_path / "mine")]) == 0
    assert "mine/local.sh" in capsys.readouterr().out
    originals = {path.name: path.read_bytes() for path in (checkout / "launch").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()} == originals
    assert os.access(tmp_path / "mine/local.sh", os.X_OK)
    found = subprocess.run(
        [tmp_path / "mine/local.sh"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert found.returncode == 2
    assert "how many processes?" in found.stderr


def test_an_edited_copy_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["launch-scripts", str(tmp_path)]) == 0
    assert main.main(["launch-scripts", str(tmp_path)]) == 0, "equal files are no conflict"
    (tmp_path / "ssh.sh").write_text("edited")
    assert main.main(["launch-scripts", str(tmp_path)]) == 2
    assert "other versions of ssh.sh: remove them" in capsys.readouterr().err
    assert (tmp_path / "ssh.sh").read_text() == "edited"
