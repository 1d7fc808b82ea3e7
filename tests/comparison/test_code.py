"""The code of another commit: a worktree of the user's checkout."""

import os
import subprocess
from pathlib import Path

import pytest

from jaxtrain.comparison.code import Code
from jaxtrain.errors import InputError

PROJECT = '[project]\nname = "own"\nversion = "0"\ndependencies = ["jax>=0.10"]\n'


def git(folder: Path, *arguments: str) -> str:
    who = {"NAME": "A", "EMAIL": "a@example.org"}
    variables = {f"GIT_{role}_{k}": v for role in ("AUTHOR", "COMMITTER") for k, v in who.items()}
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    top = tmp_path / "own"
    (top / "configs").mkdir(parents=True)
    git(top, "init", "-q", "-b", "main")
    (top / "pyproject.toml").write_text(PROJECT)
    for number in (1, 2):
        (top / "configs" / "small.py").write_text(f"run = {number}\n")
        git(top, "add", "-A")
        git(top, "commit", "-q", "-m", str(number))
        git(top, "tag", f"v{number}")
    (top / "configs" / "small.py").write_text("run = 3\n")
    return top


def test_a_commit_is_checked_out_while_it_is_compared(checkout: Path, tmp_path: Path) -> None:
    config = str(checkout / "configs" / "small.py")
    code = Code.of(config, "v1")
    assert code.commit == git(checkout, "rev-parse", "v1")[:12]
    for _ in range(2):
        with code.checked_out(tmp_path / "code") as there:
            assert there.folder == tmp_path / "code" / code.commit
            assert Path(there.path_of(config)).read_text() == "run = 1\n"
            assert there.path_of("demo") == "demo"
        assert not there.folder.exists()
    assert git(checkout, "worktree", "list").count("\n") == 0
    assert (checkout / "configs" / "small.py").read_text() == "run = 3\n"
    # What a killed comparison has left, and a user has edited.
    left = code.checked_out(tmp_path / "code")
    there = left.__enter__()
    Path(there.path_of(config)).write_text("run = 9\n")
    with code.checked_out(tmp_path / "code") as again:
        assert Path(again.path_of(config)).read_text() == "run = 1\n"


def test_what_cannot_be_compared_is_refused(checkout: Path, tmp_path: Path) -> None:
    config = str(checkout / "configs" / "small.py")
    with pytest.raises(InputError, match="has no such commit"):
        Code.of(config, "v9")
    alone = tmp_path / "alone.py"
    alone.write_text("run = 1\n")
    with pytest.raises(InputError, match="is not in a git checkout"):
        Code.of(str(alone), "v1")
    (checkout / "pyproject.toml").write_text(PROJECT.replace("0.10", "0.12"))
    with pytest.raises(InputError, match=r"requires other packages .*\(dependencies differ\)"):
        Code.of(config, "v1")
    (checkout / "pyproject.toml").write_text(PROJECT)
    (checkout / "requirements.txt").write_text("numpy\n")
    with pytest.raises(InputError, match=r"\(requirements.txt differ\)"):
        Code.of(config, "v1")


def test_a_commit_without_this_feature_is_refused(checkout: Path, tmp_path: Path) -> None:
    (checkout / "jaxtrain").mkdir()
    (checkout / "jaxtrain" / "__init__.py").touch()
    git(checkout, "add", "-A")
    git(checkout, "commit", "-q", "-m", "old")
    code = Code.of(str(checkout / "configs" / "small.py"), "HEAD")
    with (
        pytest.raises(InputError, match="is older than --change-code"),
        code.checked_out(tmp_path / "code"),
    ):
        pass
    assert not (tmp_path / "code" / code.commit).exists()
