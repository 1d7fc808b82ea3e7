"""Cutting documents into sentences, by punctuation and blank lines."""

import re

# A sentence ends at a blank line, at a mark of the end with its closing quotes and white space (not
# after common English titles and initials, not before a lower-case letter), or at a CJK full stop.
_SENTENCE_END = re.compile(
    r"\n[^\S\n]*\n\s*"
    r"|[.!?…][\"'”’)\]]*"  # noqa: RUF001
    r"(?<!\bMr\.)(?<!\bMrs\.)(?<!\bMs\.)(?<!\bDr\.)(?<!\bSt\.)(?<!\bvs\.)(?<!\b[A-Z]\.)"
    r"\s+(?![a-z])"
    r"|[。！？][”’」』]*\s*"  # noqa: RUF001
)


def cut(document: str) -> list[str]:
    """The sentences of a document.

    A rule of thumb: an example of a packed sequence preferably begins and ends at these places,
    nothing else depends on them. Their join is the document without the white space between them.
    """
    parts, start = [], 0
    for match in _SENTENCE_END.finditer(document):
        parts.append(document[start : match.end()].strip())
        start = match.end()
    parts.append(document[start:].strip())
    return [part for part in parts if part]
