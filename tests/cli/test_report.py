"""``jaxtrain report``: the command line."""

from pathlib import Path

import pytest
from reporting import written_run

from jaxtrain import main
from jaxtrain.checkpoint import remote
from jaxtrain.cli import command_line
from jaxtrain.storage import bucket, lease


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


@pytest.mark.parametrize("holder", ["b, process 7", ""])
def test_a_run_in_a_bucket_trains_if_its_lease_is_held(
    holder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy on the disk is not locked."""
    history = written_run.full_history()
    run = written_run.write(tmp_path / "copy", history=history[:-1])
    monkeypatch.setattr(remote, "run_to_read", lambda url, root, say: run)
    monkeypatch.setattr(bucket, "Bucket", lambda url: url)
    monkeypatch.setattr(lease, "holder", {"s3://bucket/run": holder}.__getitem__)
    assert command_line.run("report", ["s3://bucket/run", "--out", str(tmp_path / "a.html")]) == 0
    text = (tmp_path / "a.html").read_text()
    assert ("unless it was killed: b, process 7 holds the lease" in text) == bool(holder)
