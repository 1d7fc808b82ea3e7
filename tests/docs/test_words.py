"""All prose is plain American English: pages, messages, help, docstrings, comments, test names."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

_STEMS = (
    "customi|finali|generali|initiali|maximi|minimi|normali|optimi|organi|paralleli|quanti|randomi|"
    "recogni|seriali|speciali|summari|synchroni|tokeni|utili|visuali"
)
# What no text of the project may use, and what to write instead. A space matches a line's end, too.
BANNED = {
    r"fore(?:told|tells?|telling)": "predicted, scored",
    r"mend(?:s|ed|ing)?": "fix",
    r"anew": "again, from scratch",
    r"likeliest": "most likely, greedy, top-k",
    r"(?:go|goes|going|went|gone) on(?! (?:disk|to))": "resume, continue, generate",
    r"(?<!there\s)(?:is|are) no"
    r"(?! (?:longer|more|less|fewer|larger|smaller|better|slower|faster|wider|older))": (
        "is not a, unknown, no ... found"
    ),
    r"nobody|somebody|whoever": "you, or the passive",
    r"left out|leaves? out|leaving out": "skipped, excluded, omitted",
    r"computed again": "recomputed, rematerialized",
    r"learned tokenizer": "trained tokenizer",
    r"not finite": "NaN/Inf",
    r"rows at once": "per-device batch size, microbatch",
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
# What a user types or a program prints, and where a link leads.
_CODE = re.compile(r"^```.*?^```$|``[^`]+``|`[^`\n]+`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)
_PREFIX = re.compile(r"^[a-zA-Z]*(\"\"\"|'''|\"|')")
# Python 3.12 splits f-strings into tokens; what is between their texts does not end a text.
_FSTRING_TEXT = getattr(tokenize, "FSTRING_MIDDLE", None)
_FSTRING_PARTS = (getattr(tokenize, "FSTRING_START", None), getattr(tokenize, "FSTRING_END", None))


class Text(NamedTuple):
    """A piece of prose and the line of the file that it begins in."""

    line: int
    text: str


_PATTERNS = [
    (re.compile(rf"\b(?:{word})\b".replace(" ", r"\s+"), re.IGNORECASE), instead)
    for word, instead in BANNED.items()
]


def banned(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields the line within ``text``, the word, and its replacement, for words outside of code."""
    prose = _CODE.sub(lambda code: "\n" * code[0].count("\n"), text)
    for pattern, instead in _PATTERNS:
        for match in pattern.finditer(prose):
            yield prose.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), instead


def of_python(source: str, strings: bool = True) -> Iterator[Text]:
    """Comments, docstrings and names of tests, and with ``strings`` every other string literal.

    Neighboring pieces are one text, so that a phrase that a line's end cuts is found.
    """
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    }
    line, parts, kind = 0, [], None
    previous, depth = "", 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            continue
        if token.type in _FSTRING_PARTS:
            depth += 1 if token.type == _FSTRING_PARTS[0] else -1
            continue
        if depth and token.type != _FSTRING_TEXT:  # a value in an f-string
            continue
        if token.type == tokenize.COMMENT:
            new_kind, text = "comment", token.string.lstrip("#: ")
        elif token.type == _FSTRING_TEXT and strings:
            new_kind, text = "string", token.string
        elif token.type == tokenize.STRING and (strings or token.start[0] in docstrings):
            text = _PREFIX.sub("", token.string).rstrip("\"'").replace("\\n", "\n")
            new_kind = "string"
        elif token.type == tokenize.NAME and previous == "def" and token.string.startswith("test_"):
            new_kind, text = "name", token.string.replace("_", " ")
        else:
            new_kind, text = None, ""
        previous = token.string
        if new_kind != kind or token.start[0] > line + sum(part.count("\n") + 1 for part in parts):
            if parts:
                yield Text(line, "\n".join(parts))
            line, parts, kind = token.start[0], [], new_kind
        if new_kind:
            parts.append(text)
    if parts:
        yield Text(line, "\n".join(parts))


def texts(path: Path) -> Iterator[Text]:
    source = path.read_text()
    if path.suffix == ".py":
        yield from of_python(source, strings="tests" not in path.parts)
    else:
        yield Text(1, source)


def files(checkout: Path) -> list[Path]:
    """What the words hold for. RESULTS.md and LOG.md are a diary: what was written stays."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split("\n")
    suffixes = (".py", ".md", ".sh", ".sbatch", ".yaml", ".toml", ".cff", ".js", ".css", ".html")
    return [
        checkout / name
        for name in listed
        if (name.endswith(suffixes) or name == ".ci/run")
        and name not in ("benchmarks/LOG.md", "benchmarks/RESULTS.md", "tests/docs/test_words.py")
        and not name.startswith("tests/fixtures/")
    ]


def test_no_text_uses_a_banned_word(checkout: Path) -> None:
    paths = files(checkout)
    assert len(paths) > 400
    wrong = [
        f"{path}:{text.line + line - 1}: {word!r}: {instead}"
        for path in paths
        if path.exists()
        for text in texts(path)
        for line, word, instead in banned(text.text)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "planted",
    [
        "Each token is foretold once.",
        "Mend the file.",
        "It begins anew.",
        "the likeliest token",
        "The run goes on with the next step.",
        "It is gone on.",
        "x is no field",
        "Rows are left\nout.",
        "Tokenise the text.",
        "GPU utilisation",
        "a grey image of odd colours",
        "the centre",
        "an optimiser's behaviour",
    ],
)
def test_a_planted_word_is_found(planted: str) -> None:
    assert list(banned(f"First line.\n{planted}\n"))


@pytest.mark.parametrize(
    "source",
    [
        '"""It mends."""',
        "x = 1  # mended",
        'raise E(f"{x} is "\n    "no field")',
        'raise E("foretold " f"{x}")',
        "# what is\n# not finite",
        "def test_it_begins_anew(): ...",
    ],
)
def test_a_planted_word_is_found_in_code(source: str) -> None:
    assert [word for text in of_python(source) for word in banned(text.text)]


def test_code_and_links_are_exempt() -> None:
    text = "`data.colour`\n```sh\ntokenise grey\n```\n[styles](colours.css)\n"
    assert not list(banned(text))
    assert [line for line, _, _ in banned(text + "grey")] == [6]
    assert not list(banned("there is no such file; it is no longer there"))
    assert not [word for text in of_python("mend = grey()") for word in banned(text.text)]
