"""ssh.sh, with an ssh that runs each command on this machine, through sh as a login shell."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from launch.stub import Stubs
from program import wait_for

from jaxtrain import supervisor
from jaxtrain.checkpoint import remote

RUN = ("--config", "demo", "--output-dir", "run")
TWO = "# two hosts\nme@a   # the first\n\nb\r\n"


def hosts(directory: Path, text: str = TWO) -> str:
    (directory / "hosts.txt").write_text(text)
    return "hosts.txt"


def alive(pid: str) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_each_host_runs_a_process_and_its_output_has_its_name(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, 'play() { echo "hello $1"; echo "oh" >&2; env >env.$1; }')
    odd = ("--output-dir=a b", "--data.path", 'it\'s $HOME "x" *', "--y", "")
    code, out, err = stubs.run("ssh.sh", hosts(tmp_path), *odd, COORDINATOR_PORT="4711")
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[b] hello 1", "[b] oh", "[me@a] hello 0", "[me@a] oh"]
    for index in (0, 1):
        address, count, devices, *arguments = stubs.calls(index)[0]
        assert (address, count, devices) == ("127.0.0.1:4711", "2", "")
        assert arguments == ["-m", "jaxtrain.main", *odd, "--resume", "latest"]
        assert "NCCL_SOCKET_IFNAME=^lo,docker" in (tmp_path / f"env.{index}").read_text()
    assert (tmp_path / "a b").is_dir()


@pytest.mark.long
def test_a_process_left_by_a_broken_connection_is_ended(tmp_path: Path) -> None:
    """The host finds it by a variable, and ends no other process."""
    stubs = Stubs(tmp_path, "play() { :; }")
    loop = ["bash", "-c", "while :; do sleep 0.1; done", "jaxtrain.main"]
    marks = {index: f"{tmp_path} run {index}" for index in (1, 2)}
    left, other = (
        subprocess.Popen(loop, env={supervisor.MARK: mark}, start_new_session=True)
        for mark in marks.values()
    )
    try:
        code, _, err = stubs.run("ssh.sh", hosts(tmp_path), *RUN)
        assert code == 0, err
        assert left.wait(10) == -signal.SIGTERM
        assert other.poll() is None
    finally:
        left.kill()
        other.kill()
        other.wait()


@pytest.mark.long
def test_a_run_in_a_bucket_uses_the_cache_of_its_hosts(tmp_path: Path) -> None:
    home = tmp_path / "host"
    home.mkdir()
    stage = remote.stage("s3://bucket/one", home / ".cache" / "jaxtrain")
    save = f'mkdir -p "{stage}/checkpoints" && echo {{}} >"{stage}/checkpoints/$2.json"'
    stubs = Stubs(tmp_path, f"play() {{ (($1)) || {{ {save}; }}; exit 75; }}")
    (tmp_path / "mine").write_text("no folder can be created here")
    code, _, err = stubs.run(
        *("ssh.sh", hosts(tmp_path), "--config", "demo", "--output-dir", "s3://bucket/one"),
        HOME=str(tmp_path / "mine"),
        JAXTRAIN_CACHE=str(tmp_path / "mine"),
        REMOTE_HOME=str(home),
        MAX_RESTARTS="0",
    )
    assert code == 1
    assert "no new checkpoint (newest: 1): giving up; see the log in s3://bucket/one\n" in err


# After its first start, ssh to the host "a" fails as if the host were off.
OFF = """play() {
    save 20
    sed -i 's/host == "gone"/host in ("gone", "a")/' "$STUBS/ssh"
    exit 75
}"""


@pytest.mark.long
def test_a_host_that_cannot_be_reached_is_not_a_lost_disk(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, OFF)
    code, _, err = stubs.run("ssh.sh", hosts(tmp_path, "a\n"), *RUN, MAX_RESTARTS="2")
    assert code == 1
    assert len(stubs.calls(0)) == 1
    assert err.count("and a cannot be reached now. Not starting from scratch") == 2
    assert "after 2 checks a still cannot be reached: giving up" in err
    assert "disk" not in err
    assert "in a row" not in err


def test_no_host_keeps_a_folder_if_one_host_fails_the_check(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { :; }")
    assert stubs.run("ssh.sh", hosts(tmp_path, "a\ngone\n"), *RUN)[0] == 2
    assert not (tmp_path / "run").exists()


SAVES = """play() {
    echo $$ >"$STUBS/pid.$index"
    trap 'echo saving; sleep 0.3; touch saved.$index; exit 75' TERM
    (($2 > 1)) || stopped
}"""


@pytest.mark.long
def test_a_broken_connection_ends_its_process(tmp_path: Path) -> None:
    """It still saves although its output is not read; then all restart."""
    stubs = Stubs(tmp_path, SAVES)
    with stubs.start("ssh.sh", hosts(tmp_path), *RUN, SILENCE_S="3") as launcher:
        wait_for(lambda: len(list(stubs.stubs.glob("ready.*"))) == 2, launcher)
        connection = int((stubs.stubs / "ssh.b").read_text().split()[-1])
        os.kill(connection, signal.SIGKILL)
        _, err = launcher.communicate(timeout=100)
        assert launcher.returncode == 0, err
    assert (tmp_path / "saved.0").exists()
    assert (tmp_path / "saved.1").exists()
    assert len(stubs.calls(1)) == 2


@pytest.mark.long
def test_no_process_outlives_a_killed_launcher(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, SAVES)
    with stubs.start("ssh.sh", hosts(tmp_path), *RUN, SILENCE_S="3") as launcher:
        wait_for(lambda: len(list(stubs.stubs.glob("ready.*"))) == 2, launcher)
        pids = [(stubs.stubs / f"pid.{index}").read_text().strip() for index in (0, 1)]
        launcher.kill()
        launcher.wait()
        wait_for(lambda: not any(alive(pid) for pid in pids), seconds=60)
        launcher.communicate(timeout=60)  # and its pipes are closed
    assert (tmp_path / "saved.0").exists()
    assert (tmp_path / "saved.1").exists()


@pytest.mark.parametrize(
    ("text", "arguments", "more", "message"),
    [
        (None, RUN, {}, "cannot read the hosts file 'hosts.txt'"),
        ("# none\n", RUN, {}, "hosts.txt lists no hosts: write one"),
        ("a\na\n", RUN, {}, "a is listed twice: remove one"),
        ("a b\n", RUN, {}, "'a b' is not a host name: write one host per line"),
        ("-oProxyCommand=x\n", RUN, {}, "is not a host name"),
        ("a\n", ("--config", "demo"), {}, "--output-dir is missing"),
        ("a\ngone\n", RUN, {}, "gone: ssh: connect to host gone: Connection refused"),
        ("a\n", RUN, {"REMOTE_DIR": "/nowhere"}, "a: the folder /nowhere does not exist"),
        ("a\n", RUN, {"PYTHON": "no-python"}, "a: 'no-python' was not found"),
        ("a\n", RUN, {"PYTHON": "/bin/false"}, "a: /bin/false cannot import jaxtrain"),
        ("a\n", ("--output-dir", "/proc/x"), {}, "a: cannot create the run directory"),
    ],
)
def test_wrong_use_is_one_line_and_starts_nothing(
    tmp_path: Path,
    text: str | None,
    arguments: tuple[str, ...],
    more: dict[str, str],
    message: str,
) -> None:
    stubs = Stubs(tmp_path, "play() { :; }")
    if text is not None:
        hosts(tmp_path, text)
    code, out, err = stubs.run("ssh.sh", "hosts.txt", *arguments, **more)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not (stubs.stubs / "calls.0").exists()
