"""Discovers the packages, and writes the description for a package index.

Configs and launch scripts ship inside the package, too.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup


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
    packages=[
        *find_packages(include=["jaxtrain", "jaxtrain.*"]),
        "jaxtrain.configs",
        "jaxtrain.launch",
    ],
    package_dir={
        "jaxtrain": "jaxtrain",
        "jaxtrain.configs": "configs",
        "jaxtrain.launch": "launch",
    },
)
