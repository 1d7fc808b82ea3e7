"""The console on a real pseudo-terminal and elsewhere, and escaping of control characters."""

import contextlib
import io
import math
import os
import pty
import re
import select
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from telemetry import event_log

from jaxtrain import errors, terminal, versions
from jaxtrain.distributed.heartbeat import Heartbeat
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.distributed.watchdog import Watchdog
from jaxtrain.errors import InputError
from jaxtrain.telemetry import console
from jaxtrain.telemetry.console import Console, line_of
from jaxtrain.telemetry.events import EventLog
from jaxtrain.telemetry.phases import Now, Phases
from jaxtrain.telemetry.sinks import file_sinks

TERMINAL = {"TERM": "xterm", "NO_COLOR": "", "CI": "", "COLUMNS": "80", "LINES": "24"}
BEGIN = """
import sys, time
from pathlib import Path
from jaxtrain.telemetry import console
from jaxtrain import terminal
from jaxtrain.distributed.heartbeat import Heartbeat
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.telemetry.phases import Phases
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.distributed.watchdog import Watchdog

console._DRAW_EVERY_S = 0.05
phases = Phases(Watchdog(None, Heartbeat(KeyValueStore(), StopSignals())))
"""


class OnTerminal:
    """A program on a terminal of its own, and everything it has drawn there."""

    def __init__(self, body: str, **environment: str) -> None:
        self._own, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + textwrap.dedent(body)],
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            env=os.environ | TERMINAL | environment,
        )
        os.close(theirs)
        self.drawn = ""

    def until(self, wanted: str, limit_s: float = 60.0) -> str:
        """Reads until ``wanted`` was drawn; returns everything so far."""
        deadline = time.monotonic() + limit_s
        while not re.search(wanted, self.drawn):
            assert time.monotonic() < deadline, f"{wanted!r} was not drawn: {self.drawn!r}"
            assert self._read(), f"the program ended before {wanted!r}: {self.drawn!r}"
        return self.drawn

    def end(self) -> str:
        """Returns everything drawn, once the program has ended."""
        while self._read():
            pass
        self.process.wait(60)
        return self.drawn

    def close(self) -> None:
        """Closes the terminal."""
        if self._own >= 0:
            os.close(self._own)
            self._own = -1

    def _read(self) -> bool:
        if not select.select([self._own], [], [], 60.0)[0]:
            return False
        try:
            piece = os.read(self._own, 65536)
        except OSError:  # the other end is closed
            return False
        self.drawn += piece.decode()
        return bool(piece)


@pytest.fixture
def on_terminal() -> Iterator[Callable[..., OnTerminal]]:
    with contextlib.ExitStack() as stack:

        def begin(body: str, **environment: str) -> OnTerminal:
            one = OnTerminal(body, **environment)
            stack.callback(one.close)
            stack.callback(one.process.wait, 60)
            stack.callback(one.process.kill)
            return one

        yield begin


TRAINS = """
    from jaxtrain.telemetry.events import EventLog

    VAL = [f"val/{name}" for name in ("accuracy", "bits_per_byte", "loss", "psnr", "ssim")]
    with console.Console(phases, 0) as shown:
        log = EventLog(shown)
        phases.at(0, 40)
        with phases.within("compile"):
            time.sleep(0.3)
        phases.training()
        phases.stepped(10, 0.0, {"train/loss": 1.5})
        time.sleep(0.3)
        shown.show("step 10/40 [bold] | " + "x" * 80)
        print("a library", file=sys.stderr)
        time.sleep(0.3)
        log.say("run directory /runs/[red]")
        log.say("demo: 1 x cpu, jaxtrain 0.1, jax 0.10")
        values = {"loss": 1.5, "psnr": 20.0, "steps_per_second": 3, "samples_per_second": 20}
        values = {f"train/{name}": value for name, value in values.items()}
        log.say(console.console_line(10, 40, values, 3.0))
        log.say(console.validation_line(10, 40, dict.fromkeys(VAL, 0.123456)))
        log.say("warning: nearly full")
        log.say("error: full")
        terminal.warn("warning: on standard error")
    print("over")
    terminal.warn("error: at the end")
"""


def test_a_terminal_has_colors_and_a_live_line_below_the_permanent_lines(on_terminal: Any) -> None:
    program = on_terminal(TRAINS)
    drawn = program.end()
    assert program.process.returncode == 0, drawn
    assert re.search(r"compiling \d+s \| step 0/40", drawn)
    assert re.search(r"training ━+╌+ 10/40 \| loss 1\.5000", drawn)
    assert "step 10/40 [bold] | " + "x" * 80 + "\r\n" in drawn  # not wrapped
    assert "a library\r\n" in drawn
    assert "\x1b[2Kover\r\n" in drawn  # the live line is removed
    assert "\x1b[?25" not in drawn  # the cursor is never hidden
    assert "\x1b[2mrun directory /runs/[red]\x1b[0m\r\n" in drawn
    # 80 columns: a line breaks between fields.
    first = "step 10/40 | validation | val/accuracy 0.1235 | val/bits_per_byte 0.1235 |"
    second = "  val/loss 0.1235 | val/psnr 0.1235 | val/ssim 0.1235"
    assert f"\x1b[1m{first}\x1b[0m\r\n" in drawn
    assert f"\x1b[1m{second}\x1b[0m\r\n" in drawn
    assert "\x1b[33mwarning: nearly full\x1b[0m\r\n" in drawn
    assert "\x1b[31merror: full\x1b[0m\r\n" in drawn
    assert "\x1b[33mwarning: on standard error\x1b[0m\r\n" in drawn
    assert "\x1b[31merror: at the end\x1b[0m\r\n" in drawn
    fitting = "step 10/40 | loss 1.5000 | psnr 20.0 dB | 3.00 steps/s | eta 3s"
    assert f"{fitting}\r\n" in drawn
    assert "\x1b[2mdemo: 1 x cpu, jaxtrain 0.1, jax 0.10\x1b[0m\r\n" in drawn


VAL = [f"val/{name}" for name in ("accuracy", "bits_per_byte", "pseudo_perplexity", "psnr", "ssim")]


def test_a_pipe_and_the_log_get_no_control_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    log = event_log.attached(tmp_path, 0, 1)
    values = {"loss": 1.5, "psnr": 20.5, "gpu_memory_usage": 39.0, "steps_per_second": 0.9}
    values |= {"samples_per_second": 115.0, "data_wait_fraction": 0.01}
    step = console.console_line(
        100, 100000, {f"train/{name}": value for name, value in values.items()}, 111060.0
    )
    short = console.console_line(10, 40, {"train/loss": 1.5}, 3.0)
    validation = console.validation_line(10, 40, {"val/loss": 1.5} | dict.fromkeys(VAL, 0.25))
    for line in ("warning: nearly full", short, validation, step):
        log.say(line)
    log.log(versions.line())
    log.close()
    terminal.warn("error: full")
    found = capsys.readouterr()
    assert found.out.splitlines() == [
        "warning: nearly full",
        "step 10/40 | loss 1.5000 | eta 3s",
        str(validation),  # lines of a pipe are not broken
        str(step).replace(" | 115 examples/s", ""),  # at most 110 columns
    ]
    assert found.err == "error: full\n"
    logged = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.partition("Z ")[2] for line in logged] == [
        *("warning: nearly full", str(short), str(validation), str(step), versions.line())
    ]


def test_a_terminal_that_disappears_does_not_end_the_run(on_terminal: Any, tmp_path: Path) -> None:
    program = on_terminal(
        f"""
        import signal
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with console.Console(phases, 0) as shown:
            phases.training()
            shown.show("here")
            while not Path({str(tmp_path / "gone")!r}).exists():
                time.sleep(0.05)
            for _ in range(5):
                shown.show("after the terminal is gone")
                time.sleep(0.1)
        terminal.plain("at the end")
        """
    )
    program.until("here")
    program.close()
    (tmp_path / "gone").touch()
    assert program.process.wait(60) == 0


class Clock:
    """A clock that the test moves."""

    now = 100.0
    asked = 0

    def __call__(self) -> float:
        self.asked += 1
        return self.now


def test_without_a_terminal_a_long_phase_prints_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_CHECK_EVERY_S", 0.01)
    clock = Clock()
    phases = Phases(Watchdog(None, Heartbeat(KeyValueStore(), StopSignals())), clock=clock)
    with Console(phases, 0, {}) as shown, contextlib.closing(EventLog(shown)) as log:
        log.attach(file_sinks(tmp_path, 0, 1), tmp_path)
        shown.note_in(log)

        def after(seconds: float) -> list[str]:
            clock.now += seconds
            asked = clock.asked
            while clock.asked < asked + 2:  # the second call follows the note for the first
                time.sleep(0.01)
            return capsys.readouterr().out.splitlines()

        with phases.within("compile"):
            assert after(29.0) == []
            assert after(2.0) == ["compiling: 31s so far"]
            assert after(58.0) == []
            assert after(3.0) == ["compiling: 1m32s so far"]
            shown.show("a message of the compiler")
            assert after(59.0) == ["a message of the compiler"]
            assert after(2.0) == ["compiling: 2m33s so far"]
        with phases.within("save"):
            assert after(31.0) == ["saving: 31s so far"]
        phases.training()
        assert after(300.0) == []
    logged = (tmp_path / "log.txt").read_text()
    assert "Z compiling: 1m32s so far\n" in logged


VALUES = {
    "train/loss": 6.0645,
    "train/data_wait_fraction": 0.03,
}


def test_the_live_line_drops_fields_that_do_not_fit() -> None:
    training = Now("training", 0.0, 30, 60, 100.0, 4.0, VALUES)
    fields = "30/60 | 0.25 steps/s | eta 1m58s | loss 6.0645 | data wait 3%"
    assert line_of(training, 102.0, 200) == f"training {'━' * 20}{'╌' * 20} {fields}"
    assert line_of(training, 102.0, 99) == f"training {'━' * 10}{'╌' * 9} {fields}"
    shorter = fields.removesuffix(" | data wait 3%")
    assert line_of(training, 102.0, 79) == f"training {'━' * 8}{'╌' * 7} {shorter}"
    assert line_of(training, 102.0, 40) == "training ━━━━╌╌╌╌ 30/60 | 0.25 steps/s"
    assert line_of(training, 102.0, 20) == "training 30/60"
    assert line_of(training, 102.0, 5) == "train"
    slow = line_of(training, 225.0, 79)
    assert "30/60 | this step 2m05s | 0.25 steps/s | eta 0s" in slow
    first = Now("training", 0.0, 0, 60, 100.0, None, {})
    assert line_of(first, 103.0, 30) == f"training {'╌' * 8}  0/60"
    assert (
        line_of(Now("save", 90.0, 30, 60, 0.0, 4.0, VALUES), 102.0, 79) == "saving 12s | step 30/60"
    )
    assert line_of(Now("start", 90.0, None, None, 0.0, None, {}), 102.0, 79) == "starting 12s"


def test_a_count_shows_rate_rest_and_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 31.0, 40.0))
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    said: list[str] = []
    with terminal.progress_bar("cutting", "videos", 1000, 38, said.append) as show:
        show(100, 2)
        show(110, 2)  # too soon
    assert said == ["cutting: 100 of 1,000 videos, 2.0/s, about 7m30s left, 2 failed"]


HOSTILE = "a\x1b[2J\x07\r\x9b31m\u202eb\u2066\x7f\udcff\n\tü ☃ \u200f\u2028"
SHOWN = "a\\x1b[2J\\x07\\x0d\\x9b31m\\u202eb\\u2066\\x7f\\xff\n\tü ☃ \\u200f\\u2028"


def test_control_characters_are_escaped() -> None:
    assert errors.visible(HOSTILE) == SHOWN
    for code in (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)):
        shown = errors.visible(chr(code))
        assert (shown == chr(code)) == (chr(code) in "\n\t"), hex(code)
    for code in (0x061C, 0x200E, 0x200F, 0x2028, 0x2029):
        assert errors.visible(chr(code)) == f"\\u{code:04x}"
    text = "".join(map(chr, range(0x20, 0x7F))) + "é日本語🙂\u200d"
    assert errors.visible(text) == text
    assert errors.one_line("a\nb\r\n\x1b") == "a\\nb\\x0d\\n\\x1b"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((7, "7"), (math.nan, "nan"), (True, "True"), (np.float64(0.5), "0.5"), (None, "None")),
        *(("a\nü\u202e", r"'a\n\xfc\u202e'"), ([1, "b"], "[1, 'b']"), (10**5000, "a int")),
        ("x" * 100, f"'{'x' * 59}..."),
    ],
    ids=map(str, range(9)),
)
def test_an_untrusted_value_is_truncated_and_one_line(value: Any, text: str) -> None:
    assert errors.short_repr(value) == text
    assert errors.short_repr("x" * 100, 200) == f"'{'x' * 100}'"


@pytest.mark.parametrize("show", [terminal.plain, terminal.out, terminal.warn])
def test_every_print_function_escapes(
    show: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    show(HOSTILE)
    found = capsys.readouterr()
    assert found.out + found.err == SHOWN + "\n"


def test_the_log_and_the_console_escape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = event_log.attached(tmp_path, 0, 1)
    log.say("skipped \x1b[2Ja\x85forged")
    log.log_error(InputError("no \x1b]0;x\x07"))
    log.log_error(ValueError("\x1b[31m"))
    log.close()
    assert capsys.readouterr().out == "skipped \\x1b[2Ja\\x85forged\n"
    written = (tmp_path / "log.txt").read_text()
    assert len(written.splitlines()) == 3
    assert "Z skipped \\x1b[2Ja\\x85forged\n" in written
    assert "Z error: no \\x1b]0;x\\x07\n" in written
    assert "\x1b" not in written


def test_an_uncaught_traceback_is_escaped() -> None:
    program = (
        "from jaxtrain import main\n"
        "def fails(): raise ValueError('\\x1b[2J')\n"
        "main.main = fails\n"
        "main.console()"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.returncode == 1
    assert found.stderr.endswith("ValueError: \\x1b[2J\n")
    assert "\x1b" not in found.stderr


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.fail(ValueError("a file is broken:\n  \x1b[2Jat byte 7\n\n"))
    terminal.fail(ValueError("x" * 10_000))
    first, second = capsys.readouterr().err.splitlines()
    assert first == "error: a file is broken: \\x1b[2Jat byte 7"
    assert second.endswith("x ... (10,000 characters)")
    assert len(second) < 4100


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_what_a_stream_cannot_write_is_escaped(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this module in any program, and by whatever prints in a program of ours."""
    for name, show in (("stdout", terminal.out), ("stdout", terminal.plain), ("stderr", _fails)):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, name, stream)
        show("Привет")
        assert b"\\u041f\\u0440" in stream.buffer.getvalue()  # type: ignore[attr-defined]
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    terminal.escape_unwritable()
    print("Привет", flush=True)
    assert b"\\u041f\\u0440" in stream.buffer.getvalue()  # type: ignore[attr-defined]


def _fails(text: str) -> None:
    terminal.fail(InputError(text))
