"""``jaxtrain report``: the command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import written_run

from jaxtrain import main
from jaxtrain.cli import command_line


def test_the_report_of_one_run_is_written_into_its_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written_run.write(tmp_path / "run", history=written_run.full_history())
    (tmp_path / "latest").symlink_to("run")
    assert command_line.run("report", [str(tmp_path / "latest")]) == 0
    assert capsys.readouterr().out == f"report: {run / 'report.html'}\n"
    text = (run / "report.html").read_text()
    assert text.startswith("<!doctype html>")
    assert text.rstrip().endswith("</html>")
    assert len(text) < 3e6


def test_the_report_of_several_runs_is_written_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [str(written_run.write(tmp_path / name)) for name in ("a", "b")]
    monkeypatch.chdir(tmp_path)
    assert command_line.run("report", runs) == 0
    assert (tmp_path / "report.html").is_file()
    assert command_line.run("report", [*runs, "--out", "c.html"]) == 0
    assert (tmp_path / "c.html").is_file()


def test_wrong_use_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written_run.write(tmp_path / "run")
    for arguments in (
        [str(tmp_path)],
        [str(run), str(tmp_path / "none")],
        [str(run), "--out", str(tmp_path)],
        [str(run), "--out", str(tmp_path / "no" / "x.html")],
        [str(run), "--wrong"],
    ):
        assert main.main(["report", *arguments]) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("error: ")
        assert printed.err.count("\n") == 1
        assert printed.out == ""
    assert main.main(["report"]) == 0
    assert "usage: jaxtrain report" in capsys.readouterr().out


def test_it_does_not_import_jax(tmp_path: Path, checkout: Path) -> None:
    """Importing jax takes seconds, and would claim a device."""
    run = written_run.write(tmp_path / "run", history=written_run.full_history())
    program = (
        "import sys; from jaxtrain import main; "
        f"assert main.main(['report', {str(run)!r}]) == 0; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=checkout, check=True, timeout=60)


def test_a_pipe_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, pipe = written_run.write(tmp_path / "run"), tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main.main(["report", str(run), "--out", str(pipe)]) == 2
    assert f"--out {pipe} is a device or a pipe" in capsys.readouterr().err
    assert pipe.is_fifo()
