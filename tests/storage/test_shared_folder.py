"""Nodes that do not see the folders of a command are named."""

from pathlib import Path

import pytest

from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import shared_folder


def test_another_folder_under_the_same_path_is_recognized(tmp_path: Path) -> None:
    file = tmp_path / "token"
    mark = shared_folder.mark(file, "OUT x")
    assert mark == shared_folder.mark(file, "OUT x")
    mark.check()
    file.write_text("other")
    with pytest.raises(InputError, match=r"OUT x on .* is not the folder of this command"):
        mark.check()
    file.unlink()
    with pytest.raises(InputError, match="use a folder that all nodes share"):
        mark.check()


def test_a_file_that_only_this_host_sees_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a"
    missing = shared_folder.unseen(path)
    assert missing is not None
    shared_folder.check_seen(missing)  # it does not exist here, either
    path.touch()
    assert shared_folder.unseen(path) is None
    with pytest.raises(InputError, match=rf"{path} does not exist on {missing.host}"):
        shared_folder.check_seen(missing)


def test_a_file_that_never_appears_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folder, "_POLL_S", 0.01)
    monkeypatch.setattr(shared_folder, "_APPEARS_S", 0.02)
    shared_folder.await_seen(tmp_path)
    with pytest.raises(RunAgain, match=rf"{tmp_path}/a was written 0 s ago, but does not exist on"):
        shared_folder.await_seen(tmp_path / "a")
