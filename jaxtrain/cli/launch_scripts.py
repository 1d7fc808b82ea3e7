"""Copies the launch scripts into a folder: local, ssh, SLURM, Kubernetes, and cloud launchers.

The scripts are inside the installed package: copy them, then run or edit the copies. Files in DIR
that differ are not overwritten.
"""

import argparse
import filecmp
import shutil
from pathlib import Path

from jaxtrain import terminal
from jaxtrain.cli import command_line
from jaxtrain.errors import InputError


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code.

    Raises:
        InputError: wrong use, or DIR has other files of these names.
    """
    flags = command_line.parse_all(_parser(), arguments)
    if flags is None:
        return 0
    sources = sorted(path for path in directory().iterdir() if _is_script(path))
    target: Path = flags.directory
    changed = [
        path.name
        for path in sources
        if (target / path.name).exists()
        and not filecmp.cmp(path, target / path.name, shallow=False)
    ]
    if changed:
        raise InputError(
            f"{target} already has other versions of {', '.join(changed)}: remove them, or choose "
            "another folder"
        )
    target.mkdir(parents=True, exist_ok=True)
    for path in sources:
        shutil.copyfile(path, target / path.name)
        if path.suffix == ".sh":  # a wheel does not keep the permission to execute
            (target / path.name).chmod(0o755)
    terminal.out(f"copied {len(sources)} files to {target}; start with {target}/local.sh")
    return 0


def directory() -> Path:
    """Returns the launch scripts' folder, in the installed package or in the checkout.

    Raises:
        InputError: neither exists.
    """
    package = Path(__file__).resolve().parents[1]
    folders = (package / "launch", package.parent / "launch")
    for folder in folders:
        if (folder / "local.sh").is_file():
            return folder
    raise InputError(f"no launch scripts: neither {folders[0]} nor {folders[1]} has local.sh")


def _is_script(path: Path) -> bool:
    return path.is_file() and path.suffix not in (".py", ".pyc")


def _parser() -> argparse.ArgumentParser:
    parser = command_line.bare_parser("launch-scripts", "jaxtrain launch-scripts DIR", __doc__)
    parser.add_argument(
        "directory", metavar="DIR", type=command_line.named_file, help="folder to copy them to"
    )
    return parser
