"""Which folders belong to a run, and which names in them."""

import json
from pathlib import Path

import pytest

from jaxtrain.errors import InputError
from jaxtrain.storage import run_marker

ID = "0123456789abcdef"


def test_a_folder_of_files_has_the_name_that_this_run_gives() -> None:
    name = run_marker.folder_name(ID, 12, "0a1b2c3d0001")
    assert run_marker.step_of_folder(name, ID) == 12
    assert run_marker.step_of_folder(name, "f" * 16) is None
    assert run_marker.step_of_folder(name, "") is None
    changed = ("13" + name[2:], name[:-1] + "g", name + "0", name.upper(), f"0{name}", name[:-4])
    assert [other for other in changed if run_marker.step_of_folder(other, ID) is not None] == []
    of_users = ("2024-01-15", "0001-panda", "1080-clips", "12-0123456789ab", "7-0123456789abcdef")
    assert [other for other in of_users if run_marker.step_of_folder(other, ID) is not None] == []


def test_a_marker_has_the_id_of_its_run(tmp_path: Path) -> None:
    assert run_marker.read(tmp_path) == ""
    assert not run_marker.is_run(tmp_path)
    (tmp_path / run_marker.NAME).write_text(run_marker.new())
    assert len(run_marker.read(tmp_path)) == 16
    assert run_marker.is_run(tmp_path)
    assert run_marker.run_above(tmp_path / "samples/a.mp4") == tmp_path
    assert run_marker.run_above(tmp_path.parent) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is damaged, so it is unknown which files are the run's"),
        ("[]", "is damaged"),
        ('{"jaxtrain": "cache"}', "is damaged"),
        (json.dumps({"jaxtrain": "run", "format": 99, "id": ID}), "in the format of another ver"),
    ],
)
def test_a_marker_that_cannot_be_used_is_refused(
    tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / run_marker.NAME).write_text(content)
    with pytest.raises(InputError, match=message):
        run_marker.read(tmp_path)


def test_what_systems_and_launchers_leave_does_not_count() -> None:
    left = (
        *("lost+found", ".DS_Store", ".nfs000000000001", ".snapshot", "slurm-1234.out"),
        *("slurm-1234_7.err", "log.1.txt", "doctor.3.txt", "restarts.json"),
        *(".jaxtrain-doctor-0a1b2c", f".{run_marker.NAME}.abcdefgh.json"),
    )
    assert run_marker.refusal("work", "--output-dir", left) == ""
    for name in ("data", ".git", "slurm.txt", "log.txt", "metrics.jsonl", ".DS_Store.bak"):
        assert run_marker.content_of([*left, name]) == [name]
    names = (run_marker.NAME, "config.json")  # another node was faster
    assert run_marker.refusal("work", "--output-dir", names) == ""
    names = ("train.py", "data", "notes", "a.mp4", "b.mp4")
    assert run_marker.refusal("work", "--output-dir", names) == (
        "--output-dir work is not empty and not a run of this version of jaxtrain (it has a.mp4, "
        "b.mp4, data and 2 more): choose a new or empty folder"
    )
