"""Discovers the packages, and writes the description for a package index.

The configs ship inside the package, too.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

# Top-level folders that a wheel has inside the package.
SHIPPED = ("configs",)


class BuildPackage(build_py):
    """Copies the configs into the package; an editable install reads the checkout.

    As packages of their own, with folders elsewhere, they would make setuptools write an editable
    install as a hook, which Python asks only after ``sys.path``. In the folder above the checkout,
    ``import jaxtrain`` would then be the checkout, as a namespace package without any module.
    """

    def run(self) -> None:
        """Builds the package."""
        super().run()
        if not self.editable_mode:
            for source, copy in self._shipped().items():
                self.mkpath(str(Path(copy).parent))
                self.copy_file(source, copy)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Lists all files that :meth:`run` writes."""
        return [*super().get_outputs(include_bytecode), *self.get_output_mapping()]

    def get_output_mapping(self) -> dict[str, str]:
        """Maps each file that :meth:`run` writes to its source."""
        shipped = {} if self.editable_mode else self._shipped()
        return super().get_output_mapping() | {copy: source for source, copy in shipped.items()}

    def _shipped(self) -> dict[str, str]:
        """Returns source -> copy for each file of :data:`SHIPPED`."""
        return {
            str(path): str(Path(self.build_lib, "jaxtrain", path))
            for folder in SHIPPED
            for path in sorted(Path(folder).iterdir())
            if path.is_file() and path.suffix != ".pyc"
        }


def description() -> str:
    """Returns README.md without what leads into the repository, which an index cannot show.

    A relative link becomes its text. Images are omitted.
    """
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    text = re.sub(r"<picture>.*?</picture>\n*|<img .*?>\n*", "", text, flags=re.DOTALL)
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?://)[^)]+\)", r"\1", text)


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    packages=find_packages(include=["jaxtrain", "jaxtrain.*"]),
    package_dir={"": "."},  # one path entry is the whole editable install
    cmdclass={"build_py": BuildPackage},
)
