"""Stop signals, sent to the process of the tests and to processes in a long call."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from program import wait_for

from jaxtrain.distributed.signals import StopSignals
from jaxtrain.errors import INTERRUPTED, RUN_AGAIN, Stopped, Wish, stop_inside

# A call in C that no handler can interrupt, such as a compilation.
BUSY = "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # the handler runs between two bytecodes


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)]
)
def test_a_signal_ends_a_run_with_nothing_to_save(
    number: signal.Signals, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Stopped) as stopped, StopSignals():
        send(number)
    assert stopped.value.code == code
    assert f"{number.name}: stopping; nothing to save" in capfd.readouterr().err


@pytest.fixture
def interrupt_collection() -> Iterator[Callable[[], None]]:
    """Yields what sends Ctrl-C during the next garbage collection; jax has a callback there, too.

    To be called when handlers are installed: any line of Python may begin a collection.
    """
    left: list[signal.Signals] = []

    def callback(phase: str, info: dict[str, int]) -> None:
        if left:
            send(left.pop())

    gc.callbacks.append(callback)
    yield lambda: left.append(signal.SIGINT)
    gc.callbacks.remove(callback)


def collect(interrupt: Callable[[], None]) -> None:
    interrupt()
    gc.collect()
    time.sleep(5)


@pytest.fixture
def switch_slowly() -> Iterator[None]:
    """Other threads compute, and hold the interpreter's lock for longer than the hook runs."""
    ends, interval = threading.Event(), sys.getswitchinterval()
    threads = [threading.Thread(target=lambda: any(iter(ends.is_set, True))) for _ in range(4)]
    sys.setswitchinterval(0.03)
    for thread in threads:
        thread.start()
    yield
    ends.set()
    sys.setswitchinterval(interval)
    for thread in threads:
        thread.join()


def test_a_stop_during_a_garbage_collection_is_not_lost(
    interrupt_collection: Callable[[], None], capfd: pytest.CaptureFixture[str]
) -> None:
    """Python drops what a handler raises there."""

    with StopSignals() as signals, pytest.raises(Stopped) as stopped:
        collect(interrupt_collection)
    assert (signals.requested, stopped.value.code) == ("SIGINT", INTERRUPTED)
    assert "Traceback" not in capfd.readouterr().err


def test_a_dropped_stop_waits_if_there_are_steps_to_save(
    interrupt_collection: Callable[[], None],
) -> None:
    with StopSignals() as signals:
        interrupt_collection()
        gc.collect()
        signals.hold()
        time.sleep(0.1)
    assert signals.requested == "SIGINT"


def test_a_dropped_stop_is_not_lost_on_a_busy_machine(
    interrupt_collection: Callable[[], None], switch_slowly: None
) -> None:
    """Python also drops what is raised while it reports what it dropped."""
    for _ in range(2):  # one of two was lost
        with StopSignals(), pytest.raises(Stopped):
            collect(interrupt_collection)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_after_hold_a_signal_is_a_request(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignals() as signals:
        signals.hold()
        assert signals.requested is None
        send(number)
        assert signals.requested == number.name
        wait_for(lambda: signals.received_signal)
        assert signals.received_signal == number.name
    assert signal.getsignal(number) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_the_first_signal_counts(capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals() as signals:
        signals.hold()
        send(signal.SIGTERM)
        send(signal.SIGTERM)  # launchers repeat it
        assert signals.requested == "SIGTERM"
    assert capfd.readouterr().err.strip() == "SIGTERM: stopping after this step"


def test_a_second_ctrl_c_stops_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals() as signals:
        signals.hold()
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert signals.requested == "SIGINT"
    assert "press Ctrl-C again" in capfd.readouterr().err


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_a_single_ctrl_c_after_another_signal_does_not_lose_the_last_steps(
    first: signal.Signals,
) -> None:
    """A host gets both if ssh.sh is killed."""
    with StopSignals() as signals:
        signals.hold()
        send(first)
        send(signal.SIGINT)
        assert signals.requested == first.name
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_a_signal_after_the_last_step_does_not_announce_a_stop(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with StopSignals() as signals:
        signals.hold()
        signals.no_more_steps()
        send(signal.SIGTERM)
        wait_for(lambda: signals.received_signal)
    assert capfd.readouterr().err.strip() == "SIGTERM: the last step is done; finishing the run"


def test_exit_actions_run_newest_first_even_if_one_fails() -> None:
    signals = StopSignals()
    ran: list[tuple[str, int]] = []

    def fail(code: int) -> None:
        ran.append(("fails", code))
        raise OSError("a dead disk")

    signals.before_exit(lambda code: ran.append(("first", code)))
    signals.before_exit(fail)
    signals.before_exit(lambda code: ran.append(("last", code)))
    signals.run_exit_actions(75)
    assert ran == [("last", 75), ("fails", 75), ("first", 75)]


def test_when_received_also_reports_an_earlier_signal() -> None:
    calls = []
    with StopSignals() as signals:
        signals.hold()
        signals.when_received(lambda: calls.append("later"))
        send(signal.SIGTERM)
        wait_for(lambda: signals.received_signal)
        signals.when_received(lambda: calls.append("before"))
    assert sorted(calls) == ["before", "later"]


def test_a_request_of_another_process_acts_as_a_signal() -> None:
    with StopSignals() as signals:
        signals.hold()
        signals.request("SIGTERM")
        wait_for(lambda: signals.received_signal)
        assert signals.requested == "SIGTERM"


@pytest.mark.parametrize("wish", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_ctrl_c_after_a_stop_that_another_process_reports_does_not_count(
    capfd: pytest.CaptureFixture[str], wish: Wish
) -> None:
    """It may be the same Ctrl-C, or that of a launcher that has lost the other host."""
    with StopSignals() as signals:
        signals.hold()
        signals.request(wish)
        wait_for(lambda: signals.received_signal)
        send(signal.SIGINT)
        assert signals.requested == signals.received_signal == wish
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert capfd.readouterr().err.count("stopping after this step") == 1


def test_a_ctrl_c_that_another_process_reports_later_counts_once() -> None:
    with StopSignals() as signals:
        signals.hold()
        signals._of_another = "SIGINT"  # as request() does before the listener has the first
        send(signal.SIGINT)
        send(signal.SIGTERM)
        assert signals.requested == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_a_run_under_nohup_ignores_a_closed_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signals.hold()
            send(signal.SIGHUP)
            assert signals.requested is signals.received_signal is None
            signals.request("SIGHUP")  # but not that of another process
            wait_for(lambda: signals.received_signal)
    finally:
        signal.signal(signal.SIGHUP, before)


def busy(hold: bool, call: str = BUSY) -> subprocess.Popen[str]:
    """Starts a process whose main thread is busy while it handles signals."""
    program = f"""
    import hashlib, time
    import jaxtrain.distributed.signals
    from jaxtrain.distributed.signals import StopSignals

    jaxtrain.distributed.signals.UNWIND_S = 0.5
    with StopSignals() as signals:
        signals.before_exit(lambda code: print("leaving with", code, flush=True))
        signals.before_exit(lambda code: 1 / 0)
        if {hold}:
            signals.hold()
            signals.when_received(lambda: print("received", signals.received_signal, flush=True))
        print("busy", flush=True)
        {call}
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )


def until_busy(process: subprocess.Popen[str]) -> Iterator[str]:
    """Returns the lines that the process prints after it has become busy."""
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    time.sleep(0.5)  # until it is
    return iter(process.stdout)


def test_a_long_call_does_not_keep_the_process_alive() -> None:
    with busy(hold=False) as process:
        printed = until_busy(process)
        process.send_signal(signal.SIGTERM)
        assert next(printed) == "leaving with 75\n"
        assert process.wait(timeout=30) == RUN_AGAIN


def test_a_signal_is_received_in_a_long_call_that_has_something_to_save() -> None:
    with busy(hold=True) as process:
        printed = until_busy(process)
        process.send_signal(signal.SIGTERM)
        assert next(printed) == "received SIGTERM\n"
        time.sleep(1)
        assert process.poll() is None  # only the watchdog ends it
        process.kill()


# A slow save that the process waits for even after an exception.
SAVING = """
        try:
            time.sleep(600)
        finally:
            time.sleep(600)
"""
# A slow save in a thread that the interpreter waits for when it exits.
IN_A_THREAD = (
    "__import__('threading').Thread(target=time.sleep, args=(600,)).start(); time.sleep(600)"
)


@pytest.mark.long
@pytest.mark.parametrize(
    "call",
    [BUSY, SAVING, IN_A_THREAD],
    ids=["in C", "saving", "thread"],
)
def test_a_second_ctrl_c_ends_the_process_at_once(call: str) -> None:
    with busy(hold=True, call=call) as process:
        try:
            printed = until_busy(process)
            process.send_signal(signal.SIGINT)
            assert next(printed) == "received SIGINT\n"
            time.sleep(0.5)
            assert process.poll() is None
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=20) == INTERRUPTED
            assert time.monotonic() - began < 10
            assert next(printed) == "leaving with 130\n"
        finally:
            process.kill()


def test_a_stop_wrapped_by_a_library_is_found() -> None:
    wrapped: BaseException | None = None
    for stop in (Stopped("SIGTERM"), KeyboardInterrupt()):
        try:
            try:
                raise stop
            except BaseException as error:
                try:
                    raise OSError("of the library") from error
                except OSError:
                    raise ValueError("of the library's user") from None
        except ValueError as error:
            wrapped = error
        assert wrapped is not None
        assert stop_inside(wrapped) is stop
    assert stop_inside(ValueError()) is None
