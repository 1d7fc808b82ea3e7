"""The command line: its flags are fixed, and wrong use is one line and exit code 2."""

import dataclasses
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import program
import pytest

from jaxtrain import config, main
from jaxtrain.cli import command_line, commands, flags, train
from jaxtrain.config import run_flags
from jaxtrain.config.run_flags import RunFlags
from jaxtrain.errors import InputError
from jaxtrain.training import session
from jaxtrain.training.diagnosis import profiler


def test_the_flags_are_fixed() -> None:
    """New settings are config fields, not flags."""
    run = {"--config", "--output-dir", "--resume", "--again", "--simulate-devices", "--debug"}
    run |= {"--profile", "--track"}
    assert {flag.name for flag in flags.of(RunFlags)} == run
    assert set(train.all_flags()) == {*run, "--version", "--help", "-h"}
    assert set(run_flags.ONE_RUN_ONLY) < set(run_flags.FLAGS)


@pytest.mark.parametrize("command", ["bench", "doctor", "plan"])
def test_the_arguments_of_a_run_can_be_pasted(command: str) -> None:
    typed = ["--debug"]
    for flag in flags.of(RunFlags):
        typed += [] if flag.kind is bool else [flag.name, "1"]
    parsed = command_line.parse(command, [*typed, "--seed", "3"])
    assert (parsed.config, parsed.overrides) == ("1", ("--seed", "3"))


@pytest.mark.parametrize("command", ["bench", "doctor", "plan", "configs show", "prepare tokens"])
def test_a_config_needs_no_flag(command: str) -> None:
    named = command_line.parse(command, ["demo", "--seed", "3"])
    assert (named.config, named.overrides) == ("demo", ("--seed", "3"))
    assert command_line.parse(command, ["--seed", "3", "--config", "demo"]).config == "demo"


@pytest.mark.parametrize("command", commands.TABLE)
def test_the_help_of_a_command_lists_its_flags(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: jaxtrain {command}")
    assert all(len(line) <= 80 for line in text.splitlines())
    for flag in flags.of(commands.TABLE[command]):
        assert f"\n  {flag.name}" in text


def test_help_needs_no_jax(checkout: Path) -> None:
    every = [[*command.split(), "--help"] for command in commands.TABLE]
    probe = f"import sys; from jaxtrain.main import main; [main(words) for words in {every}]"
    probe += "; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", probe], cwd=checkout, capture_output=True, check=True)


def test_no_field_is_taken_for_a_misspelled_flag() -> None:
    top_level = [field.name for field in dataclasses.fields(config.Run)]
    for command, kind in commands.TABLE.items():
        if issubclass(kind, commands.OfConfig):
            for name in top_level:
                parsed, _ = flags.parse(kind, command, ["demo", "--teacher", "x", f"--{name}", "3"])
                assert parsed.overrides[-2:] == (f"--{name}", "3")


DEMO_ON_8 = ["--config", "demo", "--mesh.fsdp", "8", "--data.batch_size", "8"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config", "h10_16"], "h100_16"),
        (["--confg", "demo"], "the name of a config is missing"),
        ([*DEMO_ON_8, "--optim.peek_lr", "1"], "--optim.peak_lr"),
        ([*DEMO_ON_8, "--profil", "2:3"], "did you mean --profile?"),
        (["plan", *DEMO_ON_8, "--profil", "2:3"], "did you mean --profile?"),
        ([*DEMO_ON_8, "--profile", "9:3"], "9:3"),
        (
            [*DEMO_ON_8, "--profile", "10:15", "--loop.replay_every", "12"],
            "--profile 10:15 contains step 12, which loop.replay_every 12 computes twice",
        ),
        (
            [*DEMO_ON_8, "--profile", "250:260", "--loop.replay_every", "1000"],
            "--profile 250:260 contains step 256, which",
        ),
        (["confgs", "list"], "configs"),
        (["dmeo"], "did you mean train demo?"),
        (["demo"], "to train this config: "),
        (["trian", "demo"], "did you mean train?"),
        (["train", "dmeo"], "unknown config 'dmeo'; did you mean demo?"),
        (["train", "demo", *DEMO_ON_8[2:], "--optim.peek_lr", "1"], "--optim.peak_lr"),
        (["verison"], "did you mean version?"),
        ([*DEMO_ON_8, "--lr", "1"], "--optim.peak_lr"),
        ([*DEMO_ON_8, "--bs", "1"], "--data.batch_size"),
        ([*DEMO_ON_8, "--epochs", "1"], "--loop.epochs"),
    ],
)
def test_wrong_use_is_one_line_with_the_fix(
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "start", refuse_to_start)
    assert main.main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def refuse_to_start(run: object, flags: object) -> int:
    """Replaces the start of the training, which only a missing data path reaches."""
    raise InputError("data.path is None: set --data.path")


@pytest.mark.long  # tests/test_machine.py has the message
def test_too_few_open_files_are_one_line(tmp_path: Path) -> None:
    program.write_corpus(tmp_path)
    data = ("--data.path", "corpus", "--data.workers", "8", "--output-dir", "run")
    started = program.command(*program.TINY_MLM, *data)
    found = program.execute(tmp_path, "bash", "-c", 'ulimit -n 80; exec "$@"', "bash", *started)
    assert found.returncode == 2
    text = "error: --data.workers 8: the system refuses so many processes (Too many open files): "
    assert found.stderr.startswith(text)
    assert found.stderr.count("\n") == 1


def test_a_missing_package_is_one_line_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def needs(name: str) -> Callable[..., int]:
        def train_(*_: object) -> int:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        return train_

    monkeypatch.setattr(train, "main", needs("av"))
    assert main.main(["--config", "demo"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: av is not installed for ")
    assert said.count("\n") == 1
    monkeypatch.setattr(train, "main", needs("jaxtrain.missing"))
    with pytest.raises(ModuleNotFoundError):
        main.main(["--config", "demo"])


def test_help_lists_commands_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "--resume" in text
    assert len(text.splitlines()) <= 24
    assert all(len(line) <= 80 for line in text.splitlines())
    for command in main.COMMANDS:
        assert re.search(rf"^[\w ]{{16}}{command} ", text, re.MULTILINE)


def test_help_and_version_are_also_commands(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*arguments: str) -> str:
        assert main.main([*arguments]) == 0
        return capsys.readouterr().out

    assert printed("help") == printed("--help") == printed("train") == printed()
    assert printed("help", "generate") == printed("generate", "--help")
    assert printed("help", "train") == printed("--help")
    of_config = printed("--config", "demo", "--help")
    assert printed("train", "demo", "--help") == printed("help", "train", "demo") == of_config
    assert printed("version") == printed("--version")


def test_help_of_sections(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help", "optim", "loop"]) == 0
    text = capsys.readouterr().out
    assert "--optim.peak_lr" in text
    assert "--loop.log_every" in text
    assert "--data.path" not in text
    assert "Defaults are those of demo." in text
    assert main.main(["--help", "generate"]) == 2
    assert "generate is a command" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["3", "5:5", "a:b", "-1:4"])
def test_a_profile_span_must_be_start_and_stop(text: str) -> None:
    with pytest.raises(InputError, match="START:STOP"):
        profiler.span(text)


@pytest.mark.slow
def test_a_run_works_with_closed_standard_streams(tmp_path: Path) -> None:
    """A daemon or cron may close them; files that are opened later must not take their numbers."""
    script = tmp_path / "run.sh"
    program.write_corpus(tmp_path)
    flags = [*program.TINY_MLM, "--data.path", "corpus", "--loop.steps", "2", "--output-dir", "run"]
    typed = shlex.join(program.command(*flags))
    script.write_text(f"{typed} 0>&- 1>&- 2>&-\n")
    made = program.execute(tmp_path, "bash", str(script))
    assert made.returncode == 0, made.stderr
    assert made.stdout == ""
    assert "step 2/2" in (tmp_path / "run" / "log.txt").read_text()


def test_the_console_escapes_what_a_stream_cannot_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what a command prints itself, such as generated text."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # restored after the test
    monkeypatch.setattr(main, "main", lambda: print("sortie é", flush=True))
    with pytest.raises(SystemExit):
        main.console()
    assert stream.buffer.getvalue() == b"sortie \\xe9\n"  # type: ignore[attr-defined]
