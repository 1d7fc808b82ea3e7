"""Reading a run directory, and reporting what is missing or damaged."""

from pathlib import Path

import pytest
from reporting import written_run

from jaxtrain.errors import InputError
from jaxtrain.reporting import run_files
from jaxtrain.storage import lock


def test_a_complete_run_has_nothing_missing(tmp_path: Path) -> None:
    written_run.write(tmp_path, history=written_run.full_history())
    run = run_files.read(tmp_path, "a")
    assert not run.problems
    assert (len(run.starts), run.last("end")["code"]) == (2, 0)
    assert run.config["name"] == "tiny"
    assert run.records[-1]["step"] == 100


def test_damage_is_reported_and_the_rest_is_read(tmp_path: Path) -> None:
    written_run.write(tmp_path, config=None, history=written_run.full_history())
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join([*lines[:3], "garbage\n", *lines[3:]]))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 110, "ti')
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"event": "ph')
    run = run_files.read(tmp_path, "a")
    assert run.records[-1]["step"] == 100
    assert len(run.records) == len(lines)
    assert len(run.history) == len(written_run.full_history())
    assert run.problems == [
        "metrics.jsonl: 2 lines are damaged; skipped.",
        "config.json is missing: the config is unknown.",
        "history.jsonl: 1 line is damaged; skipped.",
    ]


def test_an_input_quarantined_by_several_processes_counts_once(tmp_path: Path) -> None:
    written_run.write(tmp_path)
    one = {"path": "a.mp4", "reason": "truncated", "found": "training", "position": 3}
    written_run.lines(tmp_path / "quarantine.jsonl", [one, one])
    written_run.lines(tmp_path / "quarantine.1.jsonl", [one, one | {"path": "b.mp4"}])
    problems = run_files.read(tmp_path, "a").problems
    assert "Unreadable input files: 2; see quarantine.jsonl." in problems


def test_a_run_never_checks_its_own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing any descriptor of the file would release the lock."""
    written_run.write(tmp_path)
    monkeypatch.setattr(lock, "holder", lambda directory: "host, process 7")
    assert run_files.read(tmp_path, "a").active_process == "host, process 7"
    assert run_files.read(tmp_path, "a", holder="").active_process == ""


def test_labels_are_short_and_unique() -> None:
    def of(*paths: str) -> list[str]:
        return run_files.labels([Path(path) for path in paths])

    assert of("/x/run_a", "/x/run_b") == ["run_a", "run_b"]
    assert of("/x/demo/2026-01-31T09-00-00Z") == ["demo/2026-01-31T09-00-00Z"]
    assert of("/x/a/run", "/x/b/run") == ["a/run", "b/run"]
    assert of("/x/a", "/x/a") == ["/x/a", "/x/a"]


def test_a_folder_without_a_run_is_an_error_with_a_suggestion(tmp_path: Path) -> None:
    run = written_run.write(tmp_path / "runs" / "one")
    (run / "samples").mkdir()
    for given, expected in (
        (tmp_path / "nothing", "no such folder"),
        (run / "config.json", "this is a file"),
        (run / "samples", f"pass a run directory, such as {run}"),
        (tmp_path / "runs", f"pass a run directory, such as {run}"),
        (tmp_path, "pass a run directory, such as output/latest"),
    ):
        with pytest.raises(InputError) as refused:
            run_files.check(given, given)
        assert expected in str(refused.value)
        assert str(given) in str(refused.value)
    run_files.check(run, run)
