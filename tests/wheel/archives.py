"""Checks that a wheel and an sdist contain all files of the package.

    python tests/wheel/archives.py SOURCE DIST

SOURCE is a checkout without caches; DIST contains one .whl and one .tar.gz. Requires no packages.
"""

import re
import sys
import tarfile
import zipfile
from pathlib import Path

PACKAGES = ("jaxtrain", "configs")
# What the sdist must contain besides the packages: everything that its tests read.
BESIDE = {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "setup.py"}
FOLDERS = (".ci", "benchmarks", "docs", "launch", "tests")


def main(source: Path, dist: Path) -> list[str]:
    """Returns one line per problem."""
    (wheel,) = dist.glob("*.whl")
    (sdist,) = dist.glob("*.tar.gz")
    shipped, beside = (
        {
            str(path.relative_to(source))
            for folder in folders
            for path in (source / folder).rglob("*")
            if path.is_file()
        }
        for folders in (PACKAGES, FOLDERS)
    )
    with zipfile.ZipFile(wheel) as archive:
        packaged = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        description = archive.read(metadata).decode()
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    # configs/ is installed inside the package.
    installed = {f"jaxtrain/{name}" if name.startswith("configs/") else name for name in shipped}
    return [
        *(f"{wheel.name} lacks {name}" for name in sorted(installed - packaged)),
        *(f"{wheel.name} has an unexpected {name}" for name in sorted(packaged - installed)),
        *(f"{sdist.name} lacks {name}" for name in sorted((shipped | beside | BESIDE) - in_sdist)),
        *(
            f"{wheel.name}: the description links {link}, which is not on a package index"
            for link in re.findall(r"\]\((?!https?://)([^)]+)\)|<img", description)
        ),
    ]


if __name__ == "__main__":
    problems = main(Path(sys.argv[1]), Path(sys.argv[2]))
    print("\n".join(problems) or "the wheel and the sdist contain every file of the package")
    sys.exit(1 if problems else 0)
