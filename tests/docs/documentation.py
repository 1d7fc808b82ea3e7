"""The documentation describes this checkout: its commands parse, its links and paths exist.

Every tracked Markdown file is a page: README.md, docs/ with all of its folders, and the others.

Not part of the ordinary suite: `.ci/run docs` runs it.
"""

import ast
import io
import itertools
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from jaxtrain import main
from jaxtrain.cli import flags, train
from jaxtrain.config.run_flags import RunFlags

CHECKOUT = Path(__file__).resolve().parents[2]
SHELL = ("sh", "bash", "console")
# What a command line in the documentation can start with, after variables and other programs.
PROGRAM = re.compile(r"(?:\S*python3? -m jaxtrain(?:\.main)?|(?<![\w./-])jaxtrain|\S*launch/\S+)\s")
# What stands for any value in a command.
PLACEHOLDER = re.compile(r"NAME|COMMAND|\.\.\.|[A-Z]")
# The flag that launchers take themselves.
LAUNCHERS_DOCTOR = "--doctor"
# In front of flags that are not the program's.
OTHER_PROGRAMS = (
    *("sbatch", "srun", "kubectl", "docker", "tensorboard", "nvidia-smi", "pip", "git", "ray "),
    "apptainer",
)
# What was measured or changed once: its commands and paths were right at the time.
HISTORY = ("RESULTS.md", "LOG.md", "CHANGELOG.md")
# A heading that is an error message, word for word: no instruction.
MESSAGE = re.compile(r"^### `(.+)`$", re.MULTILINE)
# Folders that a path in backticks can begin with, if it is one of this checkout.
FOLDERS = ("jaxtrain/", "configs/", "launch/", "tests/", "docs/", "benchmarks/", ".ci/", ".github/")


def pages() -> list[Path]:
    """Every tracked Markdown file."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.md"], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    names = listed.stdout.split("\0") if listed.returncode == 0 else []
    found = [CHECKOUT / name for name in names if name and (CHECKOUT / name).exists()]
    return found or sorted([*CHECKOUT.glob("*.md"), *CHECKOUT.glob("[a-z]*/**/*.md")])


def instructions() -> list[Path]:
    """The pages that say what to type now."""
    return [page for page in pages() if page.name not in HISTORY]


def read(page: Path) -> str:
    """A page without the error messages that are its headings."""
    return MESSAGE.sub("", page.read_text())


def shell_blocks(text: str) -> Iterator[tuple[int, str]]:
    """Line number and content of each fenced block of shell."""
    for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if match[1] in SHELL:
            yield text.count("\n", 0, match.start()) + 2, match[2]


def inline_code(text: str) -> Iterator[tuple[int, str]]:
    """Line number and content of everything in backticks, outside of fenced blocks."""
    without = re.sub(
        r"^```.*?^```$", lambda m: "\n" * m[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL
    )
    for match in re.finditer(r"(?<!`)`([^`]+)`(?!`)", without):
        yield without.count("\n", 0, match.start()) + 1, " ".join(match[1].split())


def commands() -> list[tuple[str, list[str]]]:
    """Where, and the arguments of the program, for each of its command lines."""
    found = []
    for page in instructions():
        text = read(page)
        blocks = [
            (number, line)
            for number, block in shell_blocks(text)
            for line in block.replace("\\\n", " ").splitlines()
        ]
        for number, line in [*blocks, *inline_code(text)]:
            for one in re.split(r"&&|;|\|(?!\|)", line):
                match = PROGRAM.search(one)
                rest = one[match.end() :] if match else ""
                words = shlex.split(rest, comments=True) if rest else []
                if "launch/" in (match[0] if match else ""):
                    # A launcher's own arguments come first; the program's are the flags.
                    flags = [n for n, word in enumerate(words) if word.startswith("--")]
                    words = words[flags[0] :] if flags else []
                    if LAUNCHERS_DOCTOR in words:  # the launcher starts that command
                        words = ["doctor", *(one for one in words if one != LAUNCHERS_DOCTOR)]
                if words:
                    where = f"{page.relative_to(CHECKOUT)}:{number}"
                    found.append((f"{where} {' '.join(words)[:60]}", words))
    return found


def printed(*arguments: str) -> str:
    """What the program prints, which must succeed."""
    output = io.StringIO()
    with redirect_stdout(output):
        assert main.main(list(arguments)) == 0, arguments
    return output.getvalue()


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", text))


def taken_by(words: list[str]) -> set[str]:
    """The flags in the help of a command, or of one of its actions, such as ``prepare clips``."""
    actions = [words[1]] if len(words) > 1 and words[0] in ("prepare",) else []
    return flags_in(printed(words[0], *actions, "--help"))


def without_program_flags(words: list[str]) -> list[str]:
    """The overrides of a training command, without the flags of a run."""
    with_value = {flag.name for flag in flags.of(RunFlags) if flag.kind is not bool}
    kept, rest = [], iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name in with_value:
            if not equals:
                next(rest, None)
        elif name not in train.all_flags():
            kept.append(word)
    return kept


def without_placeholders(words: list[str]) -> list[str]:
    """The arguments without those that stand for anything, and without the flags that take them."""
    kept: list[str] = []
    for word in words:
        if not PLACEHOLDER.fullmatch(word):
            kept.append(word)
        elif kept and kept[-1].startswith("--"):
            kept.pop()
    return kept


def config_of(words: list[str]) -> str | None:
    """The config in a command: after ``--config``, or first of a command that takes its name."""
    names = [after for word, after in itertools.pairwise(words) if word == "--config"]
    actions = words[1:3] if words[0] == "prepare" else words[:2]
    if len(actions) == 2 and actions[0] in ("plan", "bench", "doctor", "tokens", "latents"):
        names += [actions[1]] if actions[1] in shipped() else []
    return names[0] if names else None


COMMANDS = commands()


def test_commands_are_found() -> None:
    """If the pattern no longer matches how commands are written, this file would check nothing."""
    assert len(COMMANDS) >= 60
    assert {"plan", "prepare", "export", "doctor", "bench"} <= {words[0] for _, words in COMMANDS}


@pytest.mark.parametrize("words", [pytest.param(words, id=where) for where, words in COMMANDS])
def test_a_command_parses(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if words[0] == "train":
        words = ["--config", *words[1:]]
    words = without_placeholders(words)
    name = config_of(words) if words else None
    if words and not words[0].startswith("-"):
        assert words[0] in main.COMMANDS, f"no command {words[0]}"
        taken = taken_by(words)
        given = [word.partition("=")[0] for word in words if word.startswith("--")]
        unknown = [flag for flag in given if flag not in taken and "." not in flag]
        assert not unknown, f"jaxtrain {words[0]} has no {unknown}"
        overrides = _sections(words)
    else:
        overrides = without_program_flags(words)
    if name and not name.endswith(".py"):
        code = main.main(["configs", "show", name, *overrides])
        assert code == 0, capsys.readouterr().err


def _sections(words: list[str]) -> list[str]:
    """The fields of a config among a command's arguments, each with its values."""
    kept: list[str] = []
    inside = False
    for word in words:
        if word.startswith("--"):
            inside = "." in word.partition("=")[0]
        if inside:
            kept.append(word)
    return kept


def known_flags() -> set[str]:
    """Every flag and every field of every config."""
    known = set(train.all_flags())
    for command in main.COMMANDS:
        known |= flags_in(printed(command, "--help"))
    for action in ("clips", "tokens", "latents"):
        known |= flags_in(printed("prepare", action, "--help"))
    for name in shipped():
        lines = printed("configs", "show", name).splitlines()
        known |= {f"--{line.split()[0]}" for line in lines if re.match(r"[a-z_0-9.]+  ", line)}
    for program in ("chaos", "fuzz"):
        known |= flags_in((CHECKOUT / "tests" / program / "__main__.py").read_text())
    for path in (CHECKOUT / "benchmarks").rglob("*.py"):
        known |= flags_in(path.read_text())
    return known


def shipped() -> list[str]:
    return [line.split()[0] for line in printed("configs", "list").splitlines()]


def test_flags_in_the_text_exist() -> None:
    """Of a section that no shipped config switches on, only the section is looked for."""
    known = known_flags() | {LAUNCHERS_DOCTOR}
    sections = {flag for flag in known if "." in flag}
    missing = []
    for page in instructions():
        for number, code in inline_code(read(page)):
            if code.startswith(OTHER_PROGRAMS):
                continue
            for flag in sorted(flags_in(code) - known):
                parts = flag.split(".")
                if not any(".".join(parts[:size]) in sections for size in range(2, len(parts))):
                    missing.append(f"{page.relative_to(CHECKOUT)}:{number}: {flag}")
    assert not missing, "\n".join(missing)


def test_the_table_of_configs_is_complete() -> None:
    text = (CHECKOUT / "docs" / "reference" / "configs.md").read_text()
    table = re.search(r"^\| config \|.*\n(?:\|.*\n)+", text, re.MULTILINE)
    assert table, "no table with a first column 'config'"
    first = re.findall(r"^\|([^|]*)\|", table[0], re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(first))) == sorted(shipped())


def test_named_configs_are_shipped() -> None:
    """In commands and in the text; a path of the reader's own, and NAME, stand for any."""
    wrong = [
        f"{page.relative_to(CHECKOUT)}: {name}"
        for page in instructions()
        for name in re.findall(
            r"(?:--config[ =]|jaxtrain (?:train|plan|doctor) )([\w./~-]*\w)", read(page)
        )
        if name not in shipped() and not name.endswith(".py") and not PLACEHOLDER.fullmatch(name)
    ]
    assert not wrong, wrong


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+?)\s*$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")
        for heading in headings
    }


def test_links_between_files_resolve() -> None:
    broken = []
    for page in pages():
        text = page.read_text()
        for match in re.finditer(r"\]\(([^)\s]+)\)", text):
            target, _, fragment = match[1].partition("#")
            where = f"{page.relative_to(CHECKOUT)}:{text.count(chr(10), 0, match.start()) + 1}"
            if "://" in target or target.startswith("mailto:"):
                continue
            path = (page.parent / target).resolve() if target else page
            if not path.exists():
                broken.append(f"{where}: there is no {target}")
            elif fragment and path.suffix == ".md" and fragment not in anchors(path):
                broken.append(f"{where}: {path.name} has no heading #{fragment}")
    assert not broken, "\n".join(broken)


def test_paths_in_the_text_exist() -> None:
    missing = []
    for page in instructions():
        for number, code in inline_code(read(page)):
            for word in code.split():
                name = word.split("::")[0].rstrip(".,:;")
                if not name.startswith(FOLDERS) or re.search(r"[*{<$]|\.\.\.", name):
                    continue
                if not (CHECKOUT / name).exists():
                    missing.append(f"{page.relative_to(CHECKOUT)}:{number}: {name}")
    assert not missing, "\n".join(missing)


def test_shell_blocks_are_shell() -> None:
    for page in pages():
        for number, block in shell_blocks(page.read_text()):
            found = subprocess.run(
                ["bash", "-n"], input=block, capture_output=True, text=True, check=False
            )
            assert found.returncode == 0, f"{page.name}:{number}: {found.stderr}"


def test_every_page_of_the_documentation_is_checked_and_in_its_index() -> None:
    there = set((CHECKOUT / "docs").rglob("*.md"))
    assert there <= set(pages()), "not tracked by git"
    index = CHECKOUT / "docs" / "README.md"
    linked = re.findall(r"\]\(([^)#\s]+\.md)\)", index.read_text())
    assert there - {index} == {(index.parent / name).resolve() for name in linked}


def texts_of(path: Path) -> Iterator[str]:
    """The texts in a file of code; a value that is formatted into one is a line feed."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "\n" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_error_messages_in_troubleshooting_are_those_of_the_code() -> None:
    """Each piece of a heading, between values, is in a text of the package."""
    texts = [text for path in (CHECKOUT / "jaxtrain").rglob("*.py") for text in texts_of(path)]
    page = (CHECKOUT / "docs" / "troubleshooting.md").read_text()
    headings = MESSAGE.findall(page)
    assert len(headings) >= 15
    missing = [
        f"{piece!r} of {heading!r}"
        for heading in headings
        for piece in (part.removeprefix(": ") for part in heading.split("..."))
        if len(piece) > 3 and not any(piece in text for text in texts)
    ]
    assert not missing, "\n".join(missing)


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", text))


def newest_claims() -> list[dict[str, str]]:
    """The newest row of each claim in benchmarks/RESULTS.md, by column."""
    text = (CHECKOUT / "benchmarks" / "RESULTS.md").read_text()
    lines = text.partition("## Claims\n")[2].partition("\n## ")[0].strip().splitlines()
    head, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
    newest: dict[tuple[str, str], dict[str, str]] = {}
    for row in (dict(zip(head, cells, strict=False)) for cells in rows):
        key = row["area"], row["claim"]
        if key not in newest or newest[key]["date"] <= row["date"]:
            newest[key] = row
    return [*newest.values()]


def table_rows(page: str) -> Iterator[list[str]]:
    for line in (CHECKOUT / page).read_text().splitlines():
        if line.startswith("| ") and not line.startswith("|--"):
            yield [cell.strip() for cell in line[1:-1].split("|")]


def test_results_are_the_newest_rows_of_the_record() -> None:
    """Each row of docs/results.md has the date and the numbers of a row in RESULTS.md."""
    rows = [row for row in table_rows("docs/results.md") if re.match(r"\d{4}-", row[-1])]
    assert len(rows) > 30
    claims = newest_claims()
    unknown = [
        claim
        for claim, result, _, date in rows
        if not any(
            row["date"] == date and numbers(result) <= numbers(row["claim"] + " " + row["value"])
            for row in claims
        )
    ]
    assert not unknown, unknown


def test_measured_numbers_in_readme_are_in_the_record() -> None:
    text = (CHECKOUT / "README.md").read_text().partition("## Results")[2].partition("\n## ")[0]
    recorded = numbers(" ".join(row["claim"] + " " + row["value"] for row in newest_claims()))
    measured = [
        number
        for line in text.splitlines()
        if line.startswith("| ") and "planned" not in line and "---" not in line
        for number in numbers(" ".join(line.split("|")[3:5]))
    ]
    assert len(measured) > 8
    assert set(measured) <= recorded, set(measured) - recorded


def test_measured_numbers_in_the_tutorial_are_in_the_log() -> None:
    log = numbers((CHECKOUT / "benchmarks" / "LOG.md").read_text())
    rows = [row for row in table_rows("docs/tutorials/gpt-to-a-target.md") if row[0][0].isdigit()]
    assert len(rows) == 4
    assert {row[1] for row in rows} <= log


def test_counts_in_readme_are_right() -> None:
    text = (CHECKOUT / "README.md").read_text()
    cpu = ("demo", "shakespeare")
    gpu = [name for name in shipped() if not name.startswith(cpu)]
    assert (
        f"Of the [{len(shipped())} configs](docs/reference/configs.md), {len(gpu)} are for" in text
    )
    assert "The [training loop](jaxtrain/training/loop.py) is under 100 lines" in text
    assert len((CHECKOUT / "jaxtrain/training/loop.py").read_text().splitlines()) < 100
