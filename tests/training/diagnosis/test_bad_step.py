"""Runs that bad steps end, and what ``find-nan`` says afterwards, on other devices."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from program import (
    CHECKOUT,
    TINY_MLM,
    arrays,
    arrays_of,
    environment,
    execute,
    two_processes,
    write_corpus,
)
from training.diagnosis.faulty import Numbers, line

from jaxtrain.checkpoint import pointer
from jaxtrain.training import step_recorder

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
FAULTY = str(HERE / "faulty.py")
BAD = ("--data.bad", "37", "41")
EVERY = ("--data.bad", *map(str, range(64)))
FAST = "--xla_backend_optimization_level=0"


class Ended(NamedTuple):
    code: int
    out: str
    errors: str


def commands(directory: Path, devices: int, lines: Sequence[Sequence[str]]) -> list[Ended]:
    """Runs command lines, one after the other, in a process with virtual devices."""
    flags = f"--xla_force_host_platform_device_count={devices} {FAST}"
    paths = os.pathsep.join(map(str, (CHECKOUT, CHECKOUT / "tests")))
    process = subprocess.run(
        [sys.executable, str(HERE / "commands_in_one_process.py")],
        input="\n".join(map(json.dumps, lines)),
        cwd=directory,
        env=environment(directory, XLA_FLAGS=flags, PYTHONPATH=paths),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    ended = [Ended(*json.loads(text)) for text in process.stdout.splitlines()]
    assert len(ended) == len(lines), process.stderr
    return ended


CASES = {
    f"{kind}-{accumulate}": ("--model.kind", kind, "--optim.accumulate", accumulate, *BAD)
    for kind in ("forward", "backward", "within", "scanned")
    for accumulate in ("1", "2")
}
# The cases of the quick test, by the devices on which they are examined; every case in a long one.
QUICK = {4: ("forward-2",), 1: ("forward-1",)}
DEBUG = ("--debug", *BAD)
OTHER = {
    "skip": ("--optim.bad_updates", "skip", *EVERY),
    "rollback": ("--optim.bad_updates", "rollback", *EVERY),
    "update": (
        *("--debug", "--model.kind", "fine"),
        *("--optim.peak_lr", "3.4e38", "--optim.weight_decay", "10"),
    ),
}
DIVERGED = (
    *("--model.kind", "fine", "--optim.peak_lr", "1e38", "--checkpoint.every", "1"),
    *("--optim.bad_updates", "rollback"),
)


def train(name: str, *arguments: str) -> list[str]:
    return ["train", FAULTY, "--model.kind", "forward", *arguments, "--output-dir", name]


def find(name: str, devices: int) -> list[str]:
    return ["find-nan", name, "--config", FAULTY, "--json", f"{name}.{devices}.json"]


def end_and_examine(
    directory: Path, runs: Mapping[str, tuple[str, ...]], examined: Mapping[int, Sequence[str]]
) -> Path:
    """Trains runs on four devices until bad steps end them, and examines those of ``examined``."""
    ended = commands(directory, 4, [train(name, *words) for name, words in runs.items()])
    (directory / "ended.json").write_text(json.dumps(dict(zip(runs, ended, strict=True))))
    for devices, names in examined.items():
        for result in commands(directory, devices, [find(name, devices) for name in names]):
            assert result.code == 0, result.errors
    return directory


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with runs that bad steps have ended, and what was found."""
    runs = {
        **{name: CASES[name] for names in QUICK.values() for name in names},
        "debug": DEBUG,
        "update": OTHER["update"],
        "before": ("--loop.steps", "2"),  # what the others are before their bad step
    }
    return end_and_examine(
        tmp_path_factory.mktemp("bad"), runs, {4: QUICK[4], 1: (*QUICK[1], "debug", "update")}
    )


@pytest.fixture(scope="module")
def every_case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All planted NaNs, examined on four devices and on one."""
    runs = {**CASES, **OTHER, "diverged": DIVERGED}
    examined = {4: (*CASES, "diverged", "update"), 1: (*CASES, *OTHER)}
    return end_and_examine(tmp_path_factory.mktemp("every"), runs, examined)


def saved_step(directory: Path) -> Path:
    (path,) = (directory / pointer.ASIDE).glob("*.json")
    assert path.with_suffix(".txt").read_text().startswith("bad step: step ")
    return path


def ended(place: Path, name: str) -> Ended:
    return Ended(*json.loads((place / "ended.json").read_text())[name])


def report_of(place: Path, name: str, devices: int) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((place / f"{name}.{devices}.json").read_text())
    return content


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_every_planted_nan_is_found(every_case: Path, name: str, devices: int) -> None:
    test_a_planted_nan_is_found_after_the_run(every_case, name, devices)


@pytest.mark.parametrize(
    ("name", "devices"), [(name, devices) for devices, names in QUICK.items() for name in names]
)
def test_a_planted_nan_is_found_after_the_run(place: Path, name: str, devices: int) -> None:
    code, _, errors = ended(place, name)
    assert code == 2
    assert re.search(
        r"step 3 is bad: .*; see bad_steps\.jsonl: resume from the newest checkpoint with "
        r"--resume latest; lower --optim\.peak_lr, or find the cause with: \S+ find-nan \S+",
        errors,
    )
    content, kind = report_of(place, name, devices), name.partition("-")[0]
    operation = {"forward": "div", "backward": "mul", "within": "log", "scanned": "dot_general"}
    assert content["step"] == 3
    assert content["bad_step"].startswith("step 3 is bad: loss ")
    assert content["origin"].startswith(
        f"the first NaN is computed at {line(kind)} ({operation[kind]}), unless a later operation "
        "masks it; "
    )
    ids = {example["id"] for example in content["examples"]}
    assert ids
    assert ids <= {37, 41}
    (record,) = map(json.loads, (place / name / "bad_steps.jsonl").read_text().splitlines())
    for example in content["examples"]:
        assert record["ids"][example["row"]] == example["id"]
        assert example["position"] == record["position"] + example["row"]


def test_the_saved_state_is_the_one_before_the_step_with_its_batch(place: Path) -> None:
    saved = arrays_of(saved_step(place / "forward-1"))
    batch = {name: saved.pop(name) for name in list(saved) if name.startswith("batch.")}
    ids = saved.pop("ids")
    before = arrays(place / "before")
    assert saved.keys() == before.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(saved[name], array, err_msg=name)
    examples = [Numbers((37, 41)).example(number, np.random.default_rng()) for number in ids]
    np.testing.assert_array_equal(batch["batch.x"], [example["x"] for example in examples])
    np.testing.assert_array_equal(batch["batch.bad"], [example["bad"] for example in examples])


@pytest.mark.long
@pytest.mark.parametrize(("name", "words"), [("skip", "is bad: "), ("rollback", "no checkpoint")])
def test_the_first_of_several_bad_steps_is_saved(every_case: Path, name: str, words: str) -> None:
    place = every_case
    code, _, errors = ended(place, name)
    assert code == 2
    assert words in errors
    assert "or find the cause with: " in errors
    content = report_of(place, name, 1)
    assert content["bad_step"].startswith("step 1 is bad: ")
    assert [example["position"] for example in content["examples"]] == [0, 1, 2]
    saved = arrays_of(saved_step(place / name))
    assert (saved["step"], saved["examples_seen"], saved["skip_step.bad_in_a_row"]) == (0, 0, 0)


@pytest.mark.long
def test_a_run_that_rollbacks_did_not_help(every_case: Path) -> None:
    place = every_case
    code, _, errors = ended(place, "diverged")
    assert code == 2
    assert "although checkpoint 1 was restored 3 times" in errors
    assert "or find the cause with: " in errors
    content = report_of(place, "diverged", 4)
    assert content["step"] == 2
    assert "Inf in loss" in content["origin"] or "NaN in loss" in content["origin"]
    bad = list(map(json.loads, (place / "diverged" / "bad_steps.jsonl").read_text().splitlines()))
    saved = arrays_of(saved_step(place / "diverged"))
    assert saved["examples_seen"] == bad[-step_recorder.MOST_IN_A_ROW]["position"]  # last streak
    checkpoint = arrays(place / "diverged")
    for name in checkpoint:
        if name.startswith(("params.", "opt.")):
            np.testing.assert_array_equal(saved[name], checkpoint[name], err_msg=name)


def test_a_step_that_debug_refuses_is_saved(place: Path) -> None:
    code, _, errors = ended(place, "debug")
    assert code == 2
    assert re.search(r"step 3 .* computes NaN/Inf in train/.*, or find the cause with: ", errors)
    assert report_of(place, "debug", 1)["origin"] == report_of(place, "forward-1", 1)["origin"]


def test_an_update_that_overflows_is_found_although_the_gradients_are_finite(place: Path) -> None:
    code, _, errors = ended(place, "update")
    assert code == 2
    assert "step 1 (examples from 0 on) computes NaN/Inf in first.kernel, layers_LHH, " in errors
    assert report_of(place, "update", 1)["origin"] == (
        "the gradients are finite, but the optimizer computes Inf in first.kernel, "
        "layers_LHH, scale"
    )


@pytest.mark.long
def test_an_update_that_overflows_is_found_on_four_devices(every_case: Path) -> None:
    origins = [report_of(every_case, "update", devices)["origin"] for devices in (1, 4)]
    assert origins[0] == origins[1]
    assert origins[0].startswith("the gradients are finite, but the optimizer computes Inf in ")


def test_nothing_in_the_run_is_changed_and_no_resume_uses_it(place: Path) -> None:
    directory = place / "forward-2"
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    aside = saved_step(directory).relative_to(place).with_suffix("")
    shown, refused, again, resumed, listed = commands(
        place,
        4,
        [
            find("forward-2", 1),
            train("third", "--resume", str(aside)),
            ["find-nan", "before", "--config", FAULTY],
            train("forward-2", "--optim.accumulate", "2", "--resume", "latest"),
            ["checkpoints", "forward-2"],
        ],
    )
    assert shown.code == 0
    assert refused.code == 2
    assert (again.code, again.errors.count("\n")) == (2, 1)
    assert "find-nan before: this run has saved no bad step; a run saves one when" in again.errors
    assert resumed.code == 0, resumed.errors
    assert "starting from scratch" in resumed.out
    left = {path for path in before if {pointer.ASIDE, "files"} & {*path.parts}}
    assert len(left) > 3
    for path in left:  # also after the saves of the resumed run
        assert path.read_bytes() == before[path]
    assert re.search(rf"{pointer.ASIDE}/2-\w+ .*bad step: step 3 is bad", listed.out)


def test_other_models_and_runs_are_refused_in_a_line(place: Path) -> None:
    other = place / "other" / "faulty.py"
    other.parent.mkdir(exist_ok=True)
    other.write_text(
        Path(FAULTY).read_text().replace("WIDTH, ROWS = 4, 8, 16", "WIDTH, ROWS = 4, 4, 16")
    )
    given = [
        (["find-nan", "nowhere"], "nowhere: no such folder; pass a run directory"),
        (["find-nan", "other"], "other: this folder is not a run; pass a run directory"),
        (["find-nan", "debug"], "is not part of jaxtrain"),
        (["find-nan", "debug", "--config", str(other)], "has a different model or optimizer"),
    ]
    for (words, message), (code, _, errors) in zip(
        given, commands(place, 1, [words for words, _ in given]), strict=True
    ):
        assert (code, errors.count("\n")) == (2, 1), (words, errors)
        assert message in errors


@pytest.mark.long
def test_two_processes_save_what_one_examines(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    (tmp_path / "corpus/text9.txt").write_text(" ".join(["z"] * 24) + ".")
    (tmp_path / "planted.py").write_text(PLANTED)
    flags = [*TINY_MLM, "--data.path", "corpus", "--loop.steps", "4", "--seed", "54"]
    flags += ["--optim.bad_updates", "off"]
    flags += ["--simulate-devices", "4", "--mesh.fsdp", "4", "--output-dir", "out"]
    with two_processes(tmp_path, *flags, program=["planted.py"], both={"XLA_FLAGS": FAST}) as both:
        outputs = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [2, 2], "\n".join(outputs)
    for output in outputs:
        assert re.search(r"step \d+ is bad: .*, or find the cause with: \S+ find-nan out", output)
    examined = execute(
        tmp_path,
        *(sys.executable, "planted.py", "find-nan", "out", "--json", "found.json"),
        XLA_FLAGS=FAST,
    )
    assert examined.returncode == 0, examined.stderr
    content = json.loads((tmp_path / "found.json").read_text())
    assert content["origin"].startswith("the first NaN is computed at planted.py:12 (div), unless")
    (example,) = content["examples"]
    names = ("bad_steps.jsonl", "bad_steps.1.jsonl")
    lists = [json.loads((tmp_path / "out" / name).read_text())["ids"] for name in names]
    assert [*lists[0], *lists[1]][example["row"]] == example["id"]


# An example with many equal tokens in a row makes the loss 0/0.
PLANTED = """
import jax.numpy as jnp
from jaxtrain import main
from jaxtrain.models import mlm

inherited = mlm.MaskedLanguageModel.hidden_states

def hidden_states(self, tokens_BS, *arguments):
    x_BSD = inherited(self, tokens_BS, *arguments)
    equal_BS = (tokens_BS[:, 1:] == tokens_BS[:, :-1]) & (tokens_BS[:, 1:] != self.pad_id)
    fine_B11 = (equal_BS.sum(1) < 8).astype(x_BSD.dtype)[:, None, None]
    return x_BSD * (fine_B11 / fine_B11)

mlm.MaskedLanguageModel.hidden_states = hidden_states
main.console()
"""
