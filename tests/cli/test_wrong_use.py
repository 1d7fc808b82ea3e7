"""Wrong use of a command that needs no files is one line, with exit code 2."""

import shlex

import pytest
from program import TINY_MLM

from jaxtrain import main

TINY = shlex.join([*TINY_MLM[2:], *("--loop.steps", "4", "--mesh.fsdp", "1")])
B1 = "--change '--optim.b1 0.8'"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("bench --seconds 3", "the name of a config is missing"),
        ("bench --config demo --json /nowhere/at/all.json", "/nowhere/at"),
        ("bench --config h100_8 --efficiency /tmp/new.json", "measures one device"),
        ("compare demo", 'what is compared with demo? Add --change "--section.field VALUE"'),
        ("compare demo demo_gpt demo_mlm", "compare takes two configs, not 3"),
        ("compare demo --change '--seed 1'", "side b has seed 1, and a 42: change other fields"),
        (f"compare demo {B1} --metric val/nothing", "--metric val/nothing: use a"),
        (f"compare demo {B1} --metric train/loss", "--metric train/loss: use a"),
        (f"compare demo {B1} --pairs 0", "--pairs 0: use at least 1"),
        (f"compare demo_mlm {TINY} {B1}", "checkpoint.best_metric is None: name what"),
        (
            f"compare demo_mlm {TINY} {B1} --metric val/loss",
            "side a has no validation: set --loop.eval_every",
        ),
        (
            f"compare demo_mlm {TINY} --loop.eval_every 4 {B1} --metric val/loss --fit-time 5",
            "--fit-time 5: use a duration such as 90s, 5m, or 1.5h",
        ),
        ("compare demo --change-code no-such-branch", "no-such-branch: "),
        ("compare /tmp /tmp /tmp", "compare takes pairs of runs, but 3 folders are given"),
        (f"compare /tmp /tmp {B1}", "compare of runs that exist trains nothing; omit the flag"),
        (
            "compare /tmp /tmp --fit-time 5m",
            "--fit-time 5m: compare of runs that exist",
        ),
        (
            "compare /tmp /tmp --optim.b1 0.8",
            "--optim.b1 0.8: compare of runs that exist",
        ),
        ("configs shwo", "configs: unknown action 'shwo'; did you mean show?"),
        ("configs show h10_16", "'h10_16'; did you mean h100_16, h100_1, or h100_64?"),
        ("configs show h100_8 --seeed 3", "did you mean --seed?"),
        ("doctor --output-dir x", "the name of a config is missing"),
        ("doctor --config demo --optim.peek_lr 1", "--optim.peak_lr"),
        ("plan --config demo --gpu h1000", "did you mean h100"),
        ("plan --config demo --gps 1x8", "plan: unknown flag --gps; did you "),
        (
            "prepare clips /tmp out --engine spark",
            "--engine takes one of local, ray, not 'spark'",
        ),
        ("plan --config h100_16 --gpus 3x8", "cannot be split over 24 devices"),
        (
            "plan --config h100_16 --mesh.fsdp 20 --data.batch_size 20",
            "do not fill nodes of 8",
        ),
        ("plan --config demo --fit-seconds 0", "--fit-seconds 0"),
        ("plan --config h100_16 --rate-per-core 0", "--rate-per-core 0: use more than 0"),
        (f"plan --config h100_16 --efficiency {__file__}", "as an efficiency file"),
        ("prepare frames", "unknown action 'frames'; choose from clips, tokens, latents"),
        ("prepare clips /gone /tmp/out", "no such file or folder"),
        ("prepare clips /tmp out --workers 0", "--workers 0: use at least 1"),
        ("prepare clips /tmp out --heigth 64", "unknown flag --heigth; did you mean --height?"),
        ("prepare clips /tmp out --no-such", " prepare clips --help"),
        ("prepare latents --config demo", "prepare latents: missing --teacher PATH"),
        (
            "prepare latents --config demo_mlm --teacher x",
            "--config demo_mlm has a model that learns from no latents: use",
        ),
        ("prepare latents --config demo --teacher /x", "/x: no such file"),
        (
            "prepare latents --config demo --teacher /x --data.path /gone",
            "--data.path /gone: no such file",
        ),
    ],
)
def test_wrong_use_is_one_line(
    typed: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(shlex.split(typed)) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert expected in printed.err
    assert printed.err.count("\n") == 1
