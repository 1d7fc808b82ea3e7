"""ssh.sh, with an ssh that runs each command on this machine, through sh as a login shell."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from launch.stub import Stubs
from program import wait_for

RUN = ("--config", "demo", "--output-dir", "run")
TWO = "# two hosts\nme@a   # the first\n\nb\r\n"


def hosts(directory: Path, text: str = TWO) -> str:
    (directory / "hosts.txt").write_text(text)
    return "hosts.txt"


def alive(pid: str) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_each_host_runs_its_launcher_and_its_output_has_its_name(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, 'play() { echo "hello $1"; echo "oh" >&2; env >env.$1; }')
    odd = ("--output-dir=a b", "--data.path", 'it\'s $HOME "x" *', "--y", "")
    code, out, err = stubs.run(
        *("ssh.sh", hosts(tmp_path), *odd),
        COORDINATOR_PORT="4711",
        NCCL_DEBUG="IN FO",
        JAXTRAIN_CACHE="of this machine",
    )
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[b] hello 1", "[b] oh", "[me@a] hello 0", "[me@a] oh"]
    for index in (0, 1):
        assert stubs.calls(index)[0][5 : 5 + len(odd)] == list(odd)
        environment = (tmp_path / f"env.{index}").read_text()
        for line in (
            *("WORLD_SIZE=2", f"RANK={index}", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=4711"),
            *("NCCL_DEBUG=IN FO", "NCCL_SOCKET_IFNAME=^lo,docker,virbr,veth"),
        ):
            assert f"{line}\n" in environment
        assert "JAXTRAIN_CACHE" not in environment
    assert (tmp_path / "a b").is_dir()


def test_each_launch_takes_another_port(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { echo port $MASTER_PORT; }")
    ports = set()
    for _ in range(2):
        _, out, _ = stubs.run("ssh.sh", hosts(tmp_path, "a\n"), *RUN)
        ports.update(re.findall(r"port (\d+)", out))
    assert len(ports) == 2
    assert all(61440 <= int(port) < 65536 for port in ports)


SAVES = """play() {
    echo $$ >"$STUBS/pid.$index"
    trap 'echo saving; sleep 0.3; touch saved.$index; exit 75' TERM
    trap 'echo saving; sleep 0.3; touch saved.$index; exit 130' INT
    stopped
}"""


@pytest.mark.parametrize(
    ("number", "to_all", "code"),
    [
        (signal.SIGINT, True, 130),  # Ctrl-C on a terminal
        (signal.SIGINT, False, 130),
        (signal.SIGTERM, False, 75),
        (signal.SIGHUP, False, 75),
    ],
)
def test_a_signal_reaches_all_hosts_and_the_launcher_waits(
    tmp_path: Path, number: signal.Signals, to_all: bool, code: int
) -> None:
    stubs = Stubs(tmp_path, SAVES)
    with stubs.start("ssh.sh", hosts(tmp_path), *RUN) as launcher:
        wait_for(lambda: len(list(stubs.stubs.glob("ready.*"))) == 2, launcher)
        (os.killpg if to_all else os.kill)(launcher.pid, number)
        launcher.communicate(timeout=60)
        assert launcher.returncode == code
    assert len(list(tmp_path.glob("saved.*"))) == 2
    assert len(stubs.calls(0)) == len(stubs.calls(1)) == 1


def test_a_second_ctrl_c_reaches_the_hosts_and_a_second_sigterm_does_not(tmp_path: Path) -> None:
    plan = """play() {
        trap 'if [[ -e first.$index ]]; then exit 130; fi; touch first.$index' INT
        stopped
    }"""
    stubs = Stubs(tmp_path, plan)
    with stubs.start("ssh.sh", hosts(tmp_path), *RUN) as launcher:
        wait_for(lambda: len(list(stubs.stubs.glob("ready.*"))) == 2, launcher)
        launcher.terminate()
        wait_for(lambda: len(list(tmp_path.glob("first.*"))) == 2, launcher)
        launcher.terminate()
        time.sleep(3)
        assert launcher.poll() is None
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=60)
        assert launcher.returncode == 75


@pytest.mark.parametrize("end", ["exit 1", "exit 4", "exit 130"])
def test_if_one_host_gives_up_the_others_save_and_end(tmp_path: Path, end: str) -> None:
    stubs = Stubs(
        tmp_path, f"{SAVES}\nplay1() {{ until [[ -e $STUBS/ready.0 ]]; do :; done; {end}; }}"
    )
    plan = stubs.stubs / "plan"
    plan.write_text(plan.read_text().replace("play() {", "play() {\n((! $1)) || play1", 1))
    code, _, _ = stubs.run("ssh.sh", hosts(tmp_path), *RUN, MAX_RESTARTS="0")
    assert code == int(end.split()[1])
    assert (tmp_path / "saved.0").exists()


@pytest.mark.parametrize(("codes", "expected"), [("4 1", 4), ("0 2", 2), ("134 134", 134)])
def test_the_exit_code_says_whether_a_restart_can_help(
    tmp_path: Path, codes: str, expected: int
) -> None:
    stubs = Stubs(tmp_path, f"play() {{ set -- $1 {codes}; shift $1; exit $2; }}")
    assert stubs.run("ssh.sh", hosts(tmp_path), *RUN, MAX_RESTARTS="0")[0] == expected


def test_a_process_ends_with_its_connection_and_saves(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, SAVES)
    with stubs.start("ssh.sh", hosts(tmp_path), *RUN) as launcher:
        wait_for(lambda: len(list(stubs.stubs.glob("ready.*"))) == 2, launcher)
        connection = int((stubs.stubs / "ssh.b").read_text().split()[-1])
        os.kill(connection, signal.SIGKILL)
        launcher.communicate(timeout=100)
        assert launcher.returncode == 137
    pids = [(stubs.stubs / f"pid.{index}").read_text().strip() for index in (0, 1)]
    wait_for(lambda: not any(alive(pid) for pid in pids), seconds=60)
    assert (tmp_path / "saved.0").exists()
    assert (tmp_path / "saved.1").exists()


def test_no_process_outlives_a_killed_launcher(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, SAVES)
    with stubs.start("ssh.sh", hosts(tmp_path), *RUN) as launcher:
        wait_for(lambda: len(list(stubs.stubs.glob("ready.*"))) == 2, launcher)
        pids = [(stubs.stubs / f"pid.{index}").read_text().strip() for index in (0, 1)]
        launcher.kill()
        launcher.wait()
        wait_for(lambda: not any(alive(pid) for pid in pids), seconds=60)
        launcher.communicate(timeout=60)  # and its pipes are closed
    assert (tmp_path / "saved.0").exists()
    assert (tmp_path / "saved.1").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read the hosts file 'hosts.txt'"),
        ("# none\n", "hosts.txt lists no hosts: write one"),
        ("a\na\n", "a is listed twice: remove one"),
        ("a b\n", "'a b' is not a host name: write one host per line"),
        ("-oProxyCommand=x\n", "is not a host name"),
    ],
)
def test_wrong_use_is_one_line_and_starts_nothing(
    tmp_path: Path, text: str | None, message: str
) -> None:
    stubs = Stubs(tmp_path, "play() { :; }")
    if text is not None:
        hosts(tmp_path, text)
    code, out, err = stubs.run("ssh.sh", "hosts.txt", *RUN)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not (stubs.stubs / "ssh.a").exists()


@pytest.mark.parametrize(
    ("text", "arguments", "more", "message", "expected"),
    [
        ("a\n", RUN[:2], {}, "[a] error: --output-dir is missing", 2),
        ("gone\n", RUN, {}, "[gone] ssh: connect to host gone: Connection refused", 255),
        ("gone\na\n", RUN, {}, "[gone] ssh: connect to host gone: Connection refused", 255),
        ("a\ngone\n", RUN, {}, "error: cannot connect to gone", 2),
        ("a\n", RUN, {"REMOTE_DIR": "/nowhere"}, "/nowhere", 2),
        ("a\n", RUN, {"PYTHON": "no-python"}, "[a] error: 'no-python' was not found", 2),
        ("a\n", RUN, {"PYTHON": "/bin/false"}, "[a] error: '/bin/false' cannot import", 2),
    ],
)
def test_a_host_that_cannot_start_is_named(
    tmp_path: Path,
    text: str,
    arguments: tuple[str, ...],
    more: dict[str, str],
    message: str,
    expected: int,
) -> None:
    stubs = Stubs(tmp_path, SAVES)
    code, out, err = stubs.run("ssh.sh", hosts(tmp_path, text), *arguments, **more)
    assert code == expected, out + err
    assert message in out + err
    assert "Traceback" not in out + err
