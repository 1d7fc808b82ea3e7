"""The code of another commit of your own checkout, for a side of a comparison.

It is checked out in a git worktree, and imported in the processes of that side only, in the same
environment: so both commits must require the same packages.
"""

import contextlib
import dataclasses
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

from jaxtrain.config import files
from jaxtrain.errors import InputError
from jaxtrain.storage.atomic import expanded

_PROJECT = "pyproject.toml"
_DEPENDENCIES = ("requires-python", "dependencies", "optional-dependencies")
_PACKAGE, _NEEDED = "jaxtrain", "jaxtrain/comparison/side.py"
_DIGITS = 12


@dataclasses.dataclass(frozen=True)
class Code:
    """A commit.

    Attributes:
        folder: where the commit is checked out; None until it is.
    """

    checkout: Path
    commit: str
    folder: Path | None = None

    @classmethod
    def of(cls, config: str, revision: str) -> "Code":
        """Returns a commit of the checkout that has a config.

        Args:
            revision: as git names it, such as a branch.
        """
        path = files.find(config).absolute()
        top = _git(path.parent, "rev-parse", "--show-toplevel")
        if top is None:
            raise InputError(
                f"--change-code {revision}: {path.parent} is not in a git checkout, whose commits "
                "could be compared"
            )
        checkout = Path(top)
        commit = _git(
            checkout, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}"
        )
        if commit is None:
            raise InputError(f"--change-code {revision}: {checkout} has no such commit")
        code = cls(checkout, commit[:_DIGITS])
        code.check_packages(revision)
        return code

    def check_packages(self, revision: str) -> None:
        """Checks that the commit requires the packages that the checkout requires now."""
        now = self.checkout / _PROJECT
        texts = [now.read_text() if now.is_file() else "", self._file(_PROJECT) or ""]
        required = [tomllib.loads(text).get("project", {}) for text in texts]
        different = [
            name for name in _DEPENDENCIES if required[0].get(name) != required[1].get(name)
        ]
        different += [
            path.name
            for path in sorted(self.checkout.glob("requirements*.txt"))
            if path.read_text() != self._file(path.name)
        ]
        if different:
            raise InputError(
                f"--change-code {revision}: this commit requires other packages than your checkout "
                f"({', '.join(different)} differ), and both sides use one environment: compare "
                "runs of two environments, by their directories"
            )

    def _file(self, name: str) -> str | None:
        return _git(self.checkout, "show", f"{self.commit}:{name}", strip=False)

    def path_of(self, config: str) -> str:
        """Returns what a config is called in the code of this commit."""
        if not (config.endswith(".py") or "/" in config):
            return config
        assert self.folder is not None, "it is checked out"
        return str(self.folder / expanded(config).absolute().relative_to(self.checkout))

    @contextlib.contextmanager
    def checked_out(self, parent: Path) -> "Iterator[Code]":
        """Checks the commit out below a folder while the context is entered."""
        folder = parent.absolute() / self.commit
        self._remove(folder)  # of a comparison that was killed
        parent.mkdir(parents=True, exist_ok=True)
        completed = _run(
            self.checkout, "worktree", "add", "--force", "--detach", str(folder), self.commit
        )
        if completed.returncode:
            raise InputError(f"{folder} cannot be checked out: {completed.stderr.strip()}")
        try:
            if (folder / _PACKAGE).is_dir() and not (folder / _NEEDED).is_file():
                raise InputError(
                    f"{self.commit} is older than --change-code, so it cannot be compared by it"
                )
            yield dataclasses.replace(self, folder=folder)
        finally:
            self._remove(folder)

    def _remove(self, folder: Path) -> None:
        if folder.exists():
            _run(self.checkout, "worktree", "remove", "--force", str(folder))


def _git(folder: Path, *arguments: str, strip: bool = True) -> str | None:
    completed = _run(folder, *arguments)
    if completed.returncode:
        return None
    return completed.stdout.strip() if strip else completed.stdout


def _run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise InputError("--change-code needs git, which is not installed") from None
