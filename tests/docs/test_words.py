"""The documentation is written in plain American English."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

_STEMS = (
    "customi|finali|generali|initiali|maximi|minimi|normali|optimi|organi|paralleli|quanti|randomi|"
    "recogni|seriali|speciali|summari|synchroni|tokeni|utili|visuali"
)
# Words that no page may use, and what to write instead.
BANNED = {
    r"fore(?:told|tells?|telling)": "predicted, scored",
    r"mend(?:s|ed|ing)?": "fix",
    r"anew": "again, from scratch",
    r"likeliest": "most likely, greedy, top-k",
    r"gone on|(?:go|goes|going|went) on with": "resume, continue, generate",
    rf"\w*(?:{_STEMS})s(?:e[drs]?|ing|ations?|ers?)": "-ize",
    r"\w*colour\w*": "color",
    r"grey\w*": "gray",
    r"centre[ds]?": "center",
    r"behaviours?": "behavior",
    r"favour\w*|neighbour\w*|honour\w*": "-or",
    r"licence[ds]?": "license",
    r"catalogues?": "catalog",
    r"(?:label|model|travel|cancel)l(?:ed|ing)": "a single l",
    r"analys(?:e[ds]?|ing)|whilst|programmes?": "American spelling",
}
_WORDS = re.compile("|".join(rf"\b(?:{word})\b" for word in BANNED), re.IGNORECASE)
# What a user types or a program prints, and where a link leads.
_CODE = re.compile(r"^```.*?^```$|``[^`]+``|`[^`]+`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)


def pages(checkout: Path) -> list[Path]:
    names = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
    return [*(checkout / name for name in names), *sorted((checkout / "docs").rglob("*.md"))]


def banned(text: str) -> Iterator[str]:
    """``line: word`` for each banned word outside of code."""
    prose = _CODE.sub(lambda code: "\n" * code[0].count("\n"), text)
    for match in _WORDS.finditer(prose):
        yield f"{prose.count(chr(10), 0, match.start()) + 1}: {match[0]}"


def test_no_page_uses_a_banned_word(checkout: Path) -> None:
    assert len(pages(checkout)) > 20
    found = [
        f"{page.relative_to(checkout)}:{word}"
        for page in pages(checkout)
        for word in banned(page.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "planted",
    [
        "Each token is foretold once.",
        "Mend the file.",
        "It begins anew.",
        "the likeliest token",
        "The run goes on with the next step.",
        "It is gone on.",
        "Tokenise the text.",
        "GPU utilisation",
        "a grey image of odd colours",
        "the centre",
        "an optimiser's behaviour",
    ],
)
def test_a_planted_word_is_found(planted: str) -> None:
    assert list(banned(f"First line.\n{planted}\n"))


def test_code_and_links_are_exempt() -> None:
    text = "`data.colour`\n```sh\ntokenise grey\n```\n[styles](colours.css)\n"
    assert not list(banned(text))
    assert list(banned(text + "grey")) == ["6: grey"]
