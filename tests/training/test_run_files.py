"""The files of a run directory."""

from pathlib import Path

import pytest

from jaxtrain.checkpoint import pointer, remote
from jaxtrain.storage import lock
from jaxtrain.training import run_files

FOLDERS = {*pointer.KINDS, *pointer.ASIDES, pointer.DATA}
HERE = {lock.NAME, remote.IN_BUCKET, run_files.FILES_DUE, run_files.FINDING_NAN}


@pytest.mark.parametrize("documented", run_files.FILES)
def test_every_documented_file_is_of_a_known_kind(documented: str) -> None:
    first = documented.partition("/")[0]
    kinds = [run_files.is_own(first), first in FOLDERS, first in HERE]
    assert kinds.count(True) == 1, f"{documented}: of the run, of a checkpoint, of this machine"


@pytest.mark.parametrize("name", ["log.1.txt", "hang-0.txt", "samples/4/a.png", "wandb/latest-run"])
def test_files_of_a_run_are_its_own(name: str) -> None:
    assert run_files.is_own(name)


@pytest.mark.parametrize(
    "name",
    [
        *("notes.txt", "my.log.txt", "checkpoints/4.json", "data/4-0/state/a", ".lock"),
        *(".pod-restarts", ".config.json.ab12cd34.json", "samples/.4.png.ab12cd34.png"),
    ],
)
def test_other_files_are_not_its_own(name: str) -> None:
    assert not run_files.is_own(name)


def test_a_folder_that_cannot_be_listed_has_no_entries(tmp_path: Path) -> None:
    assert run_files.entries(tmp_path / "missing") == []
