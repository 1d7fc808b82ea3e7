"""Recognizes what takes the place of a file: a pointer, or the page of a failed download.

Each of them is valid text, so a program that reads text would otherwise train on it.
"""

import re
from pathlib import Path

HEAD_BYTES = 1024
"""How much of a file to pass to :func:`reason`."""

_POINTER = re.compile(rb"version https://(git-lfs\.github\.com|hawser\.github\.com)/spec/")
_ANNEXED = re.compile(rb"(\.\./)*(\.git)?/annex/objects/[^\s]+\s*")
_HTML = re.compile(rb"(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*<(!doctype\s+html|html)\b", re.DOTALL)
_DENIED = re.compile(rb"(<\?xml[^>]*>\s*)?<error>\s*<code>", re.DOTALL)  # of S3 and GCS
_ANSWERS = (  # complete files, of GitHub and of the Hugging Face Hub
    b"404: not found",
    b"not found",
    b"entry not found",
    b"repository not found",
    b"invalid username or password.",
)


def reason(head: bytes) -> str:
    """Returns what a file is instead of its content, and the fix; "" if nothing shows that.

    Args:
        head: the first bytes of the file.
    """
    if _POINTER.match(head):
        return "a Git LFS pointer, not the file: run git lfs pull in its repository"
    if _ANNEXED.fullmatch(head):
        return "a git-annex pointer, not the file: run git annex get in its repository"
    text = head.removeprefix(b"\xef\xbb\xbf").strip().lower()
    if _HTML.match(text):
        return "an HTML page, such as a failed download saves: download the file again"
    if _DENIED.match(text) or (len(head) < HEAD_BYTES and text in _ANSWERS):
        return "the error message of a server, not the file: download the file again"
    return ""


def of(path: Path) -> str:
    """Does the same for a file that could not be read as what it should be."""
    try:
        with open(path, "rb") as file:
            return reason(file.read(HEAD_BYTES))
    except OSError:
        return ""
