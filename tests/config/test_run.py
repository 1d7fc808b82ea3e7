"""Loads, overrides and checks configs: errors for wrong values, and the number of steps."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest

from jaxtrain import config
from jaxtrain.cli import help
from jaxtrain.config import bounds, files, overrides, run_length
from jaxtrain.errors import InputError
from jaxtrain.models.contract import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model(ModelConfig):
    frames: int = 12
    """Frames per clip."""
    widths: tuple[int, ...] = (64, 32)
    """Channels of each stage (channels)."""
    remat: Literal["none", "block"] = "none"
    """Rematerialization."""
    bias: float = -4.6
    """Initial bias of the head; a model's numbers may be negative."""
    head: Any = None
    """An optional section."""

    def check(self) -> None:
        if self.frames == 13:
            raise InputError("model.frames 13 brings bad luck")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    path: str | None = None
    """Folder."""
    batch_size: int = 64
    """Examples per batch."""
    prefetch: int = 2
    """Batches to prefetch."""
    max_bad_share: bounds.ClosedFraction = 0.1
    """Fraction of bad files."""
    flip: bool = True
    """Mirror."""
    sigma: tuple[float, float] = (0.1, 2.0)
    """Blur (pixels)."""


RUN = config.Run(
    name="toy",
    model=Model(),
    data=Data(),
    optim=config.Optim(peak_lr=1e-3, schedule="cosine", warmup_steps=10, accumulate=2),
    mesh=config.Mesh(data=1, fsdp=8, shard="params"),
    loop=config.Loop(steps=100, log_every=10, eval_every=50, eval_examples=8),
    checkpoint=config.Checkpoint(every=50, keep=2, best_metric="val/loss"),
)


def changed(*arguments: str) -> config.Run:
    run = overrides.apply(RUN, arguments)
    config.validate(run)
    return run


def message(*arguments: str) -> str:
    with pytest.raises(InputError) as caught:
        changed(*arguments)
    text = str(caught.value)
    assert "\n" not in text
    assert not set("╭│─") & set(text)
    return text


def test_overrides_of_each_type() -> None:
    run = changed(
        *("--data.path", "a b/c=d", "--optim.peak_lr=1e-2", "--model.widths", "8", "4", "2"),
        *("--optim.max_grad_norm", "None", "--data.flip", "False", "--data.sigma", "0.5", "1"),
        *("--mesh.shard", "none", "--loop.eval-every", "25", "--seed", "7", "--name", "other"),
        *("--model.remat", "block"),
    )
    assert run.data == Data(path="a b/c=d", flip=False, sigma=(0.5, 1.0))
    assert run.model == Model(widths=(8, 4, 2), remat="block")
    assert (run.optim.peak_lr, run.optim.max_grad_norm) == (1e-2, None)
    assert (run.mesh.shard, run.loop.eval_every, run.seed, run.name) == ("none", 25, 7, "other")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--optim.peek_lr", "1"], "unknown field --optim.peek_lr; "),
        (["--data.eps", "1"], "did you mean --optim.eps?"),
        (["--mesh", "8"], "--mesh is a section, not a field; its fields are --mesh.data, --mesh.f"),
        (["--xyzzy", "8"], "--help all lists the fields"),
        (["--model.head.width", "8"], "model.head is a field, not a section"),
        (["8"], "unexpected argument '8'"),
        (["--seed"], "--seed needs a value: a whole number"),
        (["--seed", "1", "2"], "--seed takes a whole number, not '1 2'"),
        (["--loop.steps", "1e5"], "a whole number or None, not '1e5'; did you mean 100000?"),
        (["--mesh.shard", "param"], "params, optimizer, none, not 'param'; did you mean params?"),
        (["--data.flip", "true"], "True or False, not 'true'; did you mean True?"),
        (["--data.sigma", "1"], "2 values, each a number, not '1'"),
        (["--model.widths", "8", "x"], "a list, each a whole number, not '8 x'"),
        (["--model.frames", "13", "--seed", "x"], "--seed takes a whole number, not 'x'"),
    ],
)  # fmt: skip
def test_a_wrong_override_names_the_right_one(arguments: list[str], expected: str) -> None:
    assert expected in message(*arguments)


@pytest.mark.parametrize("name", ["demo", "h100_8"])  # a section that is on, and one that is off
def test_a_wrong_field_of_an_optional_section_names_the_right_one(name: str) -> None:
    with pytest.raises(InputError, match=r"did you mean --optim\.muon\.peak_lr\?"):
        config.load(name, ["--optim.muon.peak_rl", "0.002"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--optim.peak_lr 0", "optim.peak_lr=0.0: use a number above 0"),
        ("--loop.steps 0", "loop.steps=0: use at least 1, or None"),
        ("--optim.peak_lr nan", "finite"),
        ("--seed -1", "seed=-1: use "),
        ("--model.bias nan", "model.bias=nan: use a finite number"),
        (
            "--data.max_bad_share 2",
            "data.max_bad_share=2.0: use a number of at least 0 and at most 1",
        ),
        ("--loop.steps None", "exactly one of steps, epochs, tokens_per_param"),
        ("--loop.epochs 3", "(loop.steps 100, loop.epochs 3, loop.tokens_per_param None); set the"),
        ("--optim.warmup_steps None", "set one of --optim.warmup_steps, --optim.warmup_fraction"),
        ("--optim.warmup_fraction 0.1", "exactly one of warmup_steps, warmup_fraction"),
        ("--optim.warmup_steps 100", "must be less than the run's 100 steps"),
        (
            "--optim.warmup_steps None --optim.warmup_fraction 1",
            "use a number of at least 0 and below 1",
        ),
        ("--loop.eval_every None", "checkpoint.best_metric val/loss needs validations"),
        ("--checkpoint.best_metric loss", "is not a validation metric"),
        (
            "--checkpoint.best_metric val/acuracy",
            "larger or smaller is better: did you mean val/accuracy? A model names",
        ),
        (
            "--checkpoint.best_metric None --loop.early_stop_patience 3",
            "loop.early_stop_patience 3 needs a metric",
        ),
        (
            "--loop.eval_every 15 --loop.early_stop_patience 7",
            "loop.early_stop_patience 7 can never be reached: a run of 100 steps, validated every "
            "15, has 7 validations: set --loop.early_stop_patience 6 or less, or "
            "--loop.early_stop_patience None",
        ),
        (
            "--loop.eval_every 100 --loop.early_stop_patience 1",
            "has 1 validation: set --loop.early_stop_patience None",
        ),
        ("--loop.steps 3B", "loop.steps=3000000000: use at most 2147483647, or None (steps, not"),
    ],
)
def test_a_wrong_value_is_named(arguments: str, expected: str) -> None:
    assert expected in message(*arguments.split())


def test_every_section_is_a_value_whose_fields_have_names() -> None:
    sections = (config.Run, config.Optim, config.Muon, config.Average, config.Mesh, config.Loop)
    for section in (*sections, config.Checkpoint):
        assert section.__dataclass_params__.frozen, section  # type: ignore[attr-defined]
        assert all(field.kw_only for field in dataclasses.fields(section)), section


def test_the_batch_arithmetic_is_one_sentence() -> None:
    assert message("--data.batch_size", "70") == (
        "data.batch_size 70 cannot be split: it is the global batch, per device x 8 devices "
        "(mesh.data 1 x mesh.fsdp 8) x 2 microbatches (optim.accumulate), so a multiple of 16: "
        "use 64 or 80"
    )
    assert message("--data.batch_size", "3").endswith("use 16 or 32")


def test_values_from_a_file_are_checked_like_flags() -> None:
    def check(**optim: Any) -> None:
        config.validate(dataclasses.replace(RUN, optim=dataclasses.replace(RUN.optim, **optim)))

    with pytest.raises(InputError, match=r"optim.schedule takes one of .* did you mean cosine\?"):
        check(schedule="cosin")
    with pytest.raises(
        InputError, match=r"optim.accumulate takes a whole number, not 2.0; did .* 2"
    ):
        check(accumulate=2.0)
    with pytest.raises(InputError, match=r"optim.accumulate takes a whole number, not True"):
        check(accumulate=True)
    check(peak_lr=1)  # an int is accepted for a float


def test_a_warm_up_and_a_patience_that_are_too_long_are_two_problems() -> None:
    with pytest.raises(InputError) as caught:
        changed("--optim.warmup_steps", "200", "--loop.early_stop_patience", "7")
    assert [text.partition(" ")[0] for text in map(str, caught.value.messages)] == [
        "optim.warmup_steps",
        "loop.early_stop_patience",
    ]


def steps(run: config.Run, **given: Any) -> int:
    values: dict[str, Any] = {"examples": 1000, "parameters": 50_000, "tokens_per_example": None}
    return run_length.resolve_steps(run, **{**values, **given})


def test_the_three_rules_for_steps() -> None:
    assert steps(RUN) == 100
    epochs = changed("--loop.steps", "None", "--loop.epochs", "5")
    assert steps(epochs) == 5 * 1000 // 64 == 78
    assert steps(epochs, examples=1024) == 80
    tokens = changed("--loop.steps", "None", "--loop.tokens_per_param", "20")
    assert steps(tokens, tokens_per_example=128) == 20 * 50_000 // (64 * 128) == 122
    rule = run_length.steps_rule(epochs, 78, examples=1000, parameters=1, tokens_per_example=None)
    assert rule == "78 steps (5 epochs x 1000 examples / batch 64)"


def test_a_run_has_at_most_as_many_examples_as_its_state_counts() -> None:
    most = changed("--loop.steps", str((2**32 - 1) // 64))
    assert steps(most) == 2**26 - 1
    position = run_length.Position(step=1, examples_seen=128)  # of another batch size
    with pytest.raises(InputError, match="4,294,967,295 examples that a run can count"):
        steps(most, position=position)


def test_a_resume_with_another_batch_size_keeps_the_number_of_examples() -> None:
    epochs = changed("--loop.steps", "None", "--loop.epochs", "5")
    assert steps(epochs, position=run_length.Position(30, 30 * 64)) == 78
    smaller = dataclasses.replace(epochs, data=dataclasses.replace(epochs.data, batch_size=32))
    half_way = run_length.Position(39, 39 * 64)
    assert steps(smaller, position=half_way) == 39 + (5000 - 39 * 64) // 32
    rule = run_length.steps_rule(
        smaller, 117, examples=1000, parameters=1, tokens_per_example=None, position=half_way
    )
    assert rule.endswith("batch 32, of which 2496 examples were learned in 39 steps)")
    tokens = changed("--loop.steps", "None", "--loop.tokens_per_param", "20")
    assert steps(tokens, tokens_per_example=128, position=run_length.Position(61, 61 * 64)) == 122


def test_an_impossible_number_of_steps_is_refused() -> None:
    epochs = changed("--loop.steps", "None", "--loop.epochs", "5")
    with pytest.raises(InputError, match=r"no steps: loop\.epochs 5 x 12 examples"):
        steps(epochs, examples=12)
    with pytest.raises(InputError, match=r"optim.warmup_steps 10 .* run's 7 steps"):
        steps(epochs, examples=100)
    patient = changed(
        "--loop.steps", "None", "--loop.epochs", "5", "--loop.early_stop_patience", "2"
    )
    with pytest.raises(InputError, match=r"early_stop_patience 2 .* run of 78 steps"):
        steps(patient)
    assert steps(patient, examples=2000) == 156
    tokens = changed("--loop.steps", "None", "--loop.tokens_per_param", "20")
    with pytest.raises(InputError, match="this model has no tokens"):
        steps(tokens)
    with pytest.raises(InputError, match=r"no steps: loop.tokens_per_param 20.0"):
        steps(tokens, parameters=3, tokens_per_example=128)


def test_configs_as_json_and_their_differences() -> None:
    before = config.to_dict(RUN)
    assert before == json.loads(json.dumps(before))
    assert before["model"]["class"].endswith("test_run.Model")
    assert before["model"]["widths"] == [64, 32]
    assert before["optim"]["peak_lr"] == 1e-3
    assert "class" not in before["optim"]
    after = config.to_dict(changed("--optim.peak_lr", "1e-2", "--model.widths", "1"))
    assert config.differences(before, before) == []
    assert config.differences(before, after) == [
        "model.widths: [64, 32] -> [1]",
        "optim.peak_lr: 0.001 -> 0.01",
    ]
    del after["data"]["path"]
    after["data"]["new"] = 1
    assert config.differences(before, after)[1:3] == [
        "data.path: None -> (absent)",
        "optim.peak_lr: 0.001 -> 0.01",
    ]
    assert config.differences(before, after)[-1] == "data.new: (absent) -> 1"


FILE = """
import dataclasses
from jaxtrain import config

base = config.named("{base}")
run = dataclasses.replace(base, seed=5)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of configs in place of the shipped ones."""
    (tmp_path / "toy_8.py").write_text('"""A toy."""' + TOY_FILE)
    (tmp_path / "toy_16.py").write_text(FILE.format(base="toy_8"))
    (tmp_path / "_hidden.py").write_text("")
    monkeypatch.setattr(files, "directory", lambda: tmp_path)
    return tmp_path


TOY_FILE = """
import dataclasses
from jaxtrain import config

@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    path: str | None = None
    batch_size: int = 64
    prefetch: int = 1
    max_bad_share: float = 0.0

run = config.Run(
    model=Data(),
    data=Data(),
    optim=config.Optim(peak_lr=1e-3, schedule="constant", warmup_steps=0),
    mesh=config.Mesh(data=1, fsdp=8, shard="none"),
    loop=config.Loop(steps=10, log_every=1, eval_examples=1),
    checkpoint=config.Checkpoint(every=5, keep=1),
)
"""


def test_configs_are_named_after_their_files(folder: Path) -> None:
    assert files.names() == ["toy_16", "toy_8"]
    derived = config.load("toy_16", ["--optim.peak_lr", "2e-3"])
    assert (derived.name, derived.seed, derived.optim.peak_lr) == ("toy_16", 5, 2e-3)
    assert config.load("toy_8").name == "toy_8"
    assert config.load(str(folder / "toy_16.py")).name == "toy_16"
    assert files.docstring("toy_8") == "A toy."
    own = folder / "own.py"
    derived = 'from jaxtrain import config\nrun = config.named("toy_8").override({"seed": 3'
    own.write_text(derived + "})\n")
    assert config.load(str(own)).name == "own"
    own.write_text(derived + ', "name": "mine"})\n')
    assert [config.load(str(own)).name for _ in range(2)] == ["mine", "mine"]


def test_a_wrong_name_or_path(folder: Path) -> None:
    for name, expected in {
        "toy_61": r"unknown config .toy_61.; did you mean toy_16 or toy_8\? .* configs list desc",
        "toy8": r"did you mean toy_8 or toy_16\?",
        "TOY": r"did you mean toy_16 or toy_8\?",
        "zzz": "unknown config .zzz.; .* configs list describes all",
        "here/none.py": "config file here/none.py does not exist",
        str(folder): "does not exist",
    }.items():
        with pytest.raises(InputError, match=expected):
            config.load(name)
    (folder / "notes.txt").write_text("")
    with pytest.raises(InputError, match=r"does not end with .py"):
        config.load(str(folder / "notes.txt"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run = 3", "sets run to a int; it must be a config.Run"),
        ("x = 3", "does not set run"),
        ("run = (", "line 1: "),
        ("\nrun = config.Rum()", "line 2: NameError"),
        (
            "from jaxtrain import config\nrun = config.Loop(log_evry=3)",
            "line 2: Loop has no field 'log_evry'; did you mean log_every?",
        ),
        (
            "from jaxtrain import config\nimport dataclasses\nbase = config.named('toy_8')\n"
            "run = dataclasses.replace(base, optim=dataclasses.replace(base.optim, peek_lr=3))",
            "line 4: Optim has no field 'peek_lr'; did you mean peak_lr?",
        ),
        (  # the video model and the video data have a Config with other fields
            "from jaxtrain.data import video\nfrom jaxtrain.models import gpt, mlm, video_ae\n"
            "run = (\n    gpt,\n    mlm.Config(depth=3),\n)",
            "Config has no field 'depth'; choose from attend, attention_dropout, dropout,",
        ),
        (
            "import dataclasses\nfrom jaxtrain.models import gpt, mlm\n"
            "base = gpt.Config(vocab_size=64, sequence_length=8, depth=1)\n"
            "run = dataclasses.replace(base, layers=3)",
            "line 4: Config has no field 'layers'; choose from backout, depth, dropout,",
        ),
        ("from jaxtrain import config\nrun = config.Mesh(data=1)", "line 2: TypeError: Mesh"),
    ],
)
def test_a_wrong_file_names_the_line(folder: Path, text: str, expected: str) -> None:
    path = folder / "wrong.py"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        config.load(str(path))
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_help_lists_each_field_with_help_and_default() -> None:
    text = " ".join(help.fields(RUN, ["all", "optim.average", "optim.muon"]).split())
    for leaf in overrides.leaves(RUN):
        inside = {"optim.average": ".decay", "optim.muon": ".momentum"}.get(leaf.name, "")
        assert f"--{leaf.name}{inside} " in text
    assert "--model.widths INT ... Channels of each stage (channels) (default: 64 32)" in text
    assert "--data.path TEXT|None Folder (default: None)" in text
    assert "--model.remat {none,block} " in text


def test_help_of_a_section_lists_only_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """Line breaks in docstrings are removed; a section that is off is one line."""
    monkeypatch.setenv("COLUMNS", "500")
    text = help.fields(RUN, ["optim"])
    fields = [field.name for field in dataclasses.fields(config.Optim)]
    assert re.findall(r"--optim\.(\w+) ", text) == [
        name for name in fields if name not in ("muon", "average")
    ]
    assert "optim.muon is off; its fields: --help optim.muon" in text
    lines = [line for line in text.splitlines() if line.startswith("  --")]
    assert all(line.endswith(")") for line in lines if "(default" in line)
    assert text.count("(default: ") == len(fields) - 2
    single = help.fields(RUN, ["peak_lr"])
    assert "--optim.peak_lr" in single
    assert "--optim.schedule" not in single


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["--loop.steps", "7", "--data.crop", "32", "48"],
        ["--data.crop", "None", "--data.path", "a b"],
        ["--model.teacher.encoder_weight", "0.5", "--data.windows", "fixed"],
        ["--optim.average.decay", "0.9"],
    ],
)
def test_a_run_is_rebuilt_from_its_arguments(changes: list[str]) -> None:
    run = config.unchecked("demo", changes)
    arguments = config.equivalent_arguments(run)
    assert arguments[:2] == ("--config", "demo")
    assert config.unchecked("demo", arguments[2:]) == run


def test_a_printed_command_has_no_query_string() -> None:
    run = config.load("demo", ["--data.path", "https://host/list.txt?token=SENTINEL"])
    command = " ".join(config.equivalent_arguments(run))
    assert "https://host/list.txt" in command
    assert "SENTINEL" not in command
