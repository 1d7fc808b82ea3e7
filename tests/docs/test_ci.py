"""Which steps ``.ci/run`` chooses, in a small repository."""

import shutil
import subprocess
from pathlib import Path

import pytest

ALWAYS = {"tests", "lint", "docs"}


def git(repository: Path, *words: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    made = subprocess.run(
        ["git", *identity, *words], cwd=repository, capture_output=True, text=True, check=True
    )
    return made.stdout.strip()


def change(repository: Path, *paths: str) -> None:
    for path in paths:
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text("changed")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "change")


def steps(repository: Path, *arguments: str) -> set[str]:
    made = subprocess.run(
        [".ci/run", *arguments], cwd=repository, capture_output=True, text=True, check=True
    )
    return set(made.stdout.split())


@pytest.fixture
def repository(tmp_path: Path, checkout: Path) -> Path:
    """A repository whose first commit has landed."""
    (tmp_path / ".ci").mkdir()
    shutil.copy2(checkout / ".ci/run", tmp_path / ".ci/run")
    git(tmp_path, "init", "-q")
    change(tmp_path, "README.md")
    (tmp_path / ".ci/landed").write_text(git(tmp_path, "rev-parse", "HEAD") + "\n")
    change(tmp_path, "LOG.md")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "touched", "untouched"),
    [
        ("benchmarks/LOG.md", set(), {"lowest", "long", "chaos", "wheel"}),
        ("benchmarks/gpu/chapter.py", {"long", "interop"}, {"lowest", "chaos"}),
        ("docs/guides/plan.md", {"notebooks"}, {"lowest", "gpu_programs", "wheel"}),
        ("jaxtrain/reporting/page.css", {"report", "wheel", "lowest"}, {"chaos", "buckets"}),
        ("jaxtrain/checkpoint/store.py", {"chaos", "buckets", "launchers", "lowest"}, {"ray"}),
        ("jaxtrain/supervisor.py", {"chaos", "buckets", "launchers"}, {"gpu_programs"}),
        ("jaxtrain/models/gpt.py", {"gpu_programs", "interop", "hub", "long"}, {"chaos"}),
        ("launch/slurm.sbatch", {"launchers", "chaos"}, {"interop"}),
        ("tests/browser/report_page.py", {"report"}, {"chaos", "hub"}),
    ],
)
def test_a_change_runs_the_steps_that_test_it(
    repository: Path, path: str, touched: set[str], untouched: set[str]
) -> None:
    change(repository, path)
    chosen = steps(repository, "touched")
    assert chosen >= ALWAYS | touched
    assert not chosen & untouched


def test_what_everything_depends_on_runs_every_step(repository: Path) -> None:
    assert steps(repository, "touched") == ALWAYS
    change(repository, "pyproject.toml")
    every = steps(repository, "touched")
    assert {"chaos", "hub", "trackers", "lowest"} < every
    (repository / ".ci/landed").write_text(f"{'0' * 40}\n")  # not in the history of this checkout
    git(repository, "commit", "-qam", "landed")
    assert steps(repository, "touched") == every


def test_every_pattern_names_paths_of_the_checkout(checkout: Path) -> None:
    """A folder that is renamed must not silently run fewer steps."""
    folders = ("jaxtrain", "tests", "configs", "docs", "launch", "benchmarks")
    paths = [path for name in folders for path in (checkout / name).rglob("*")]
    listed = "\n".join(f"/{path.relative_to(checkout)}" for path in (*paths, *checkout.iterdir()))
    script = (
        "source <(sed -n '/^all=/,/)/p; /^paths_of()/,/^}/p' .ci/run); "
        'for step in "${all[@]}"; do echo "$step $(paths_of "$step")"; done'
    )
    made = subprocess.run(
        ["bash", "-euc", script], cwd=checkout, capture_output=True, text=True, check=True
    )
    for line in made.stdout.splitlines():
        step, _, pattern = line.partition(" ")
        if step in ALWAYS:
            assert pattern == ""
            continue
        for folder in pattern.split("|^(")[1].replace(")", "|").replace("(", "|").split("|"):
            assert f"/{folder.strip('/')}" in listed, (step, folder)
