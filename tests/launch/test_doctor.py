"""Launchers with --doctor: every host is checked once, and nothing is trained."""

from pathlib import Path

import pytest
from launch.stub import Stubs
from launch.test_slurm import BATCH

RUN = ("--config", "demo", "--output-dir", "run")
DOCTOR = ["-m", "jaxtrain.main", "doctor", *RUN]
# Each launcher with two processes; the last two run only one, as each node does.
LAUNCHERS = {
    "local.sh": (("2",), {}, (0, 1)),
    "ssh.sh": (("hosts.txt",), {}, (0, 1)),
    "slurm.sbatch": ((), BATCH, (0, 1)),
    "platform.sh": ((), {"WORLD_SIZE": "2", "RANK": "1"}, (1,)),
    "pod.sh": ((), {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, (1,)),
}


def examined(stubs: Stubs, script: str, *arguments: str) -> tuple[int, str]:
    """The launcher's exit code and all its output."""
    (stubs.directory / "hosts.txt").write_text("a\nb\n")
    before, more, _ = LAUNCHERS[script]
    code, out, err = stubs.run(script, *before, *arguments, **more)
    return code, out + err


@pytest.mark.parametrize("script", LAUNCHERS)
def test_doctor_runs_once_on_each_host_and_leaves_no_folder(tmp_path: Path, script: str) -> None:
    """Except if each node has its own launcher: another may be about to write there."""
    stubs, run = Stubs(tmp_path, "play() { [[ -d run ]] || exit 1; echo ready; }"), tmp_path / "run"
    code, output = examined(stubs, script, *RUN, "--resume", "latest", "--doctor")
    assert code == 0, output
    for index in LAUNCHERS[script][2]:
        assert [call[3:] for call in stubs.calls(index)] == [[*DOCTOR, "--resume", "latest"]]
    assert "restart" not in output
    left = [path.name for path in run.iterdir()] if run.exists() else None
    expected = {"local.sh": ["doctor.1.txt"], "ssh.sh": [], "platform.sh": [], "pod.sh": []}
    assert left == expected.get(script)
    if left == []:
        run.rmdir()
        (tmp_path / "hosts.txt").write_text("a\n")
        more = {"WORLD_SIZE": "1", "RANK": "1", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "1"}
        assert stubs.run(script, *LAUNCHERS[script][0], "--doctor", *RUN, **more)[0] == 0
        assert not run.exists()


def test_the_flag_may_be_anywhere(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { :; }")
    code, output = examined(stubs, "platform.sh", *RUN[:2], "--doctor", *RUN[2:], "--doctor")
    assert code == 0, output
    assert [call[3:] for call in stubs.calls(1)] == [DOCTOR]


@pytest.mark.long
@pytest.mark.parametrize("script", LAUNCHERS)
def test_problems_of_one_host_set_the_launchers_exit_code(tmp_path: Path, script: str) -> None:
    """Even if the other host ends first, without problems."""
    stubs = Stubs(tmp_path, "play() { (($1)) || exit 0; sleep 1; exit 1; }")
    code, output = examined(stubs, script, "--doctor", *RUN)
    assert code == (2 if script == "pod.sh" else 1), output  # JobSet would restart it after 1
    for index in LAUNCHERS[script][2]:
        assert len(stubs.calls(index)) == 1
    assert "restart" not in output
    if script == "slurm.sbatch":
        assert "requeue" not in stubs.slurm()


def test_the_others_have_time_to_finish(tmp_path: Path) -> None:
    """A host with a problem ends first; in training the others would be ended GRACE_S later."""
    stubs = Stubs(tmp_path, "play() { (($1)) && exit 1; sleep 3; echo finished; }")
    code, output = examined(stubs, "local.sh", "--doctor", *RUN)
    assert (code, "finished" in output) == (1, True), output
    assert (tmp_path / "run" / "doctor.1.txt").exists()
    assert not (tmp_path / "run" / "log.1.txt").exists()
