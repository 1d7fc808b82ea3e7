"""Sphinx's settings: ``python -m sphinx -W docs docs/_build`` builds the site, from index.html on.

The pages are plain Markdown that reads well in a repository, so nothing in them is for Sphinx. The
rest is added while it reads them: the navigation, from the lists of links in README.md; the
docstrings, on the page of the Python modules; the help of all commands and fields; and plain words
in place of links that leave docs/.
"""

import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS))
import reference  # noqa: E402  # docs/reference.py

project = "jaxtrain"
author = "The jaxtrain authors"
copyright = f"2026, {author}"
version = release = metadata.version("jaxtrain")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "README"
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "jaxtrain"
html_theme_options = {"navigation_with_keys": True}

myst_heading_anchors = 3  # links such as #resume, as a repository's pages have them
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def navigation(index: str) -> str:
    """Returns a hidden table of contents for each heading of the index."""
    trees = []
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        pages = dict.fromkeys(re.findall(r"\]\(([^)#\s]+)\.md\)", text))
        trees.append(
            "\n".join(["```{toctree}", ":hidden:", f":caption: {heading}", "", *pages, "```"])
        )
    return "\n\n".join(trees)


def modules(page: str) -> str:
    """Puts the docstrings of each module that the page links after the link."""

    def documented(match: re.Match[str]) -> str:
        name = match[1].removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return f"{match[0]}\n\n```{{eval-rst}}\n.. automodule:: {name}\n   :no-index:\n```\n"

    link = r"^\[.*\]\(\.\./\.\./(jaxtrain/\S+\.py)\)$"
    return re.sub(link, documented, page, flags=re.MULTILINE)


def without_links_outside(page: str, text: str) -> str:
    """Replaces links to files outside of docs/, which the site does not have, by their words."""

    def named(match: re.Match[str]) -> str:
        target = match[2].partition("#")[0]
        path = (DOCS / page).parent / target
        if "://" in target or not target or path.resolve().is_relative_to(DOCS):
            return match[0]
        words = match[1].replace("\\", "")
        return words if "`" in words or re.search(r"[/.]", words) is None else f"`{words}`"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", named, text)


def read(app: Sphinx, name: str, source: list[str]) -> None:
    """Adds to a page what only the site needs."""
    text = source[0]
    if name == root_doc:
        text += "\n\n" + navigation(text) + "\n"
    if name == "reference/python":
        text = modules(text)
    if name in ("reference/commands", "reference/config-fields"):
        text = reference.written(text, site=True)
    source[0] = without_links_outside(name, text)


def write_index(app: Sphinx, exception: Exception | None) -> None:
    """Copies the start page to index.html, which is what servers and readers open first.

    The start page itself is README.html, because README.md is what a repository shows.
    """
    start = Path(app.outdir) / f"{root_doc}.html"
    if exception is None and start.exists():
        shutil.copyfile(start, start.with_name("index.html"))


def setup(app: Sphinx) -> None:
    """Registers what is done with each page and with the site."""
    app.connect("source-read", read)
    app.connect("build-finished", write_index)
