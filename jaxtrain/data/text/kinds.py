"""The kinds of text files, by their names."""

import os
import re

COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
PLAIN = (".txt", ".md")
PARQUET = ".parquet"
_JSON_LINES = (".jsonl", ".json")  # .json only if compressed, as C4 has it
SUFFIXES = (
    *(*PLAIN, ".jsonl", PARQUET),
    *(f"{kind}{packed}" for kind in (".txt", *_JSON_LINES) for packed in COMPRESSED),
)
SUPPORTED = f".txt, .md, .jsonl, .parquet; .txt, .jsonl, .json also with {', '.join(COMPRESSED)}"
"""The suffixes, for messages."""

# Files of a repository that describe its data, such as README.md, LICENSE-MIT.txt, README_zh.md.
_ABOUT = re.compile(
    r"(read_?me|licen[cs]es?|copying|copyright|notice|third_party_notices|change(s|log)|authors"
    r"|contribut(ing|ors)|code_of_conduct|citation|security|requirements|data(set)?_?card|datasheet)"
    r"([-_.].*)?",
    re.IGNORECASE,
)


def suffix(name: str) -> str:
    """Returns the suffix that decides how a file is read, such as ``.jsonl`` or ``.json.gz``."""
    stem, last = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] + last if last in COMPRESSED else last


def packing(name: str) -> str:
    """Returns which of :data:`COMPRESSED` a file has; "" if it is not compressed."""
    last = os.path.splitext(name.lower())[1]
    return last if last in COMPRESSED else ""


def is_plain(name: str) -> bool:
    """Returns whether a file is plain text, without rows."""
    return suffix(name).removesuffix(packing(name)) in PLAIN


def describes(name: str) -> bool:
    """Returns whether a file most likely describes the others in its folder: a card, a license."""
    stem, last = os.path.splitext(os.path.basename(name))
    return last.lower() in PLAIN and _ABOUT.fullmatch(stem) is not None
