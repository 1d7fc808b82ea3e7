"""local.sh and the code that all launchers share, with a stand-in for Python."""

import signal
import time
from pathlib import Path

import pytest
from launch.stub import Stubs
from program import wait_for

from jaxtrain.checkpoint import remote
from jaxtrain.data import cache

RUN = ("--config", "demo", "--output-dir", "run")


def test_a_successful_run_is_started_once(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { echo out $1; echo err $1 >&2; }")
    code, out, err = stubs.run("local.sh", "2", *RUN)
    assert (code, out) == (0, "out 0\n")
    assert err == "err 0\n"
    assert sorted((tmp_path / "run" / "log.1.txt").read_text().split("\n")) == [
        "",
        "err 1",
        "out 1",
    ]
    for index in (0, 1):
        ((address, count, devices, *arguments),) = stubs.calls(index)
        assert address.startswith("127.0.0.1:")
        assert (count, devices) == ("2", "")
        assert arguments == ["-m", "jaxtrain.main", *RUN, "--again"]
    assert stubs.calls(0)[0][0] == stubs.calls(1)[0][0]


@pytest.mark.parametrize("code", [2, 4, 130])
def test_wrong_use_and_ctrl_c_end_the_launcher(tmp_path: Path, code: int) -> None:
    stubs = Stubs(tmp_path, f"play() {{ exit {code}; }}")
    assert stubs.run("local.sh", "2", *RUN)[0] == code
    assert len(stubs.calls(0)) == len(stubs.calls(1)) == 1


@pytest.mark.parametrize("code", [75, 134])
def test_temporary_failures_and_crashes_restart_at_another_port(tmp_path: Path, code: int) -> None:
    stubs = Stubs(tmp_path, f"play() {{ (($2 == 3)) || exit {code}; }}")
    assert stubs.run("local.sh", "2", *RUN)[0] == 0
    assert len({call[0] for call in stubs.calls(0)}) == 3
    assert [call[3:] for call in stubs.calls(0)] == [["-m", "jaxtrain.main", *RUN, "--again"]] * 3


@pytest.mark.parametrize(
    ("plan", "given_up_with", "newest"),
    [
        ("play() { save 7; exit 75; }", 1, 7),
        ("play() { save 7; exit 134; }", 134, 7),
        # Only a later checkpoint is progress.
        ("play() { rm -rf run/checkpoints; save $((20 - $2)); exit 75; }", 1, 17),
    ],
)
def test_restarts_without_progress_end(
    tmp_path: Path, plan: str, given_up_with: int, newest: int
) -> None:
    stubs = Stubs(tmp_path, plan)
    found, _, err = stubs.run("local.sh", "1", *RUN, MAX_RESTARTS="2")
    assert found == given_up_with
    assert len(stubs.calls(0)) == 3
    assert f"2 restarts in a row produced no new checkpoint (newest: {newest}): giving up" in err


def test_a_new_checkpoint_is_progress(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { save $2; (($2 == 4)) || exit 75; }")
    assert stubs.run("local.sh", "1", *RUN, MAX_RESTARTS="1")[0] == 0
    assert len(stubs.calls(0)) == 4


def test_a_killed_process_ends_the_others(tmp_path: Path) -> None:
    """Process 0 would wait forever, and ignores SIGTERM."""
    plan = """play() {
        (($2 == 1)) || exit 0
        if (($1)); then
            until [[ -e $STUBS/ready.0 ]]; do sleep 0.05; done
            kill -KILL $$
        fi
        trap '' TERM
        stopped
    }"""
    stubs = Stubs(tmp_path, plan)
    code, _, err = stubs.run("local.sh", "2", *RUN)
    assert code == 0, err
    assert "process 1 ended with 137 (SIGKILL)" in err
    assert "process 0 ended with 137 (SIGKILL)" in err
    assert "the other processes are still running after 1 s: sending SIGTERM" in err
    assert "the other processes are still running after 2 s: sending SIGKILL" in err
    assert "ended with 137 (SIGKILL): restart 1 of at most 5" in err
    assert "line " not in err  # bash's own message
    assert len(stubs.calls(0)) == len(stubs.calls(1)) == 2


def test_remaining_children_of_a_process_are_ended(tmp_path: Path) -> None:
    plan = 'play() { sleep 1000 & echo $! >"$STUBS/left"; kill -KILL $$; }'
    stubs = Stubs(tmp_path, plan)
    assert stubs.run("local.sh", "1", *RUN, MAX_RESTARTS="0")[0] == 137
    left = (stubs.stubs / "left").read_text().strip()
    state = Path(f"/proc/{left}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 75), (signal.SIGINT, 130)])
def test_a_signal_reaches_all_and_the_launcher_waits(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    plan = """play() {
        trap 'sleep 0.3; touch saved.$index; exit 75' TERM
        trap 'sleep 0.3; touch saved.$index; exit 130' INT
        stopped
    }"""
    stubs = Stubs(tmp_path, plan)
    with stubs.start("local.sh", "2", *RUN) as launcher:
        wait_for(lambda: len(list(stubs.stubs.glob("ready.*"))) == 2, launcher)
        launcher.send_signal(number)
        launcher.communicate(timeout=60)
        assert launcher.returncode == code
    assert (tmp_path / "saved.0").exists()
    assert (tmp_path / "saved.1").exists()
    assert len(stubs.calls(0)) == 1


def test_a_signal_ends_the_delay_before_a_restart(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { exit 75; }")
    with stubs.start("local.sh", "1", *RUN, RESTART_DELAY_S="1000") as launcher:
        wait_for(lambda: (stubs.stubs / "calls.0").exists(), launcher)
        time.sleep(0.5)
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=60)
        assert launcher.returncode == 75
    assert len(stubs.calls(0)) == 1


def test_arguments_are_passed_unchanged_and_the_first_start_uses_the_users_resume(
    tmp_path: Path,
) -> None:
    stubs = Stubs(tmp_path, "play() { (($2 == 2)) || exit 75; }")
    odd = ("--output-dir=a b", "--data.path", 'it\'s $HOME "x" *', "--resume", "400")
    assert stubs.run("local.sh", "1", *odd)[0] == 0
    assert [call[5:] for call in stubs.calls(0)] == [[*odd], [*odd, "--again"]]
    assert (tmp_path / "a b").is_dir()


@pytest.mark.parametrize(
    ("arguments", "more", "message"),
    [
        ((), {}, "how many processes"),
        (("two",), {}, "'two' is not a number of processes"),
        (("0", *RUN), {}, "'0' is not a number of processes"),
        (("1", "--config", "demo"), {}, "--output-dir is missing"),
        (("1", "--output-dir", "/proc/x"), {}, "cannot create the run directory"),
        (("1", *RUN), {"PYTHON": "no-python"}, "'no-python' was not found: activate"),
        (("1", *RUN), {"PYTHON": "/bin/false"}, "'/bin/false' cannot import jaxtrain: activate"),
        (("1", *RUN), {"MAX_RESTARTS": "many"}, "MAX_RESTARTS is 'many'"),
        (("3", *RUN), {"GPUS": "4"}, "4 GPUs cannot be shared by 3 processes"),
    ],
)
def test_wrong_use_is_one_line(
    tmp_path: Path, arguments: tuple[str, ...], more: dict[str, str], message: str
) -> None:
    stubs = Stubs(tmp_path, "play() { :; }")
    code, out, err = stubs.run("local.sh", *arguments, **more)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not (stubs.stubs / "calls.0").exists()


@pytest.mark.parametrize(
    ("count", "more", "shares"),
    [
        (2, {"GPUS": "8"}, ["0,1,2,3", "4,5,6,7"]),
        (2, {"CUDA_VISIBLE_DEVICES": "5,6"}, ["0", "1"]),
        (1, {"GPUS": "8"}, [""]),
        (3, {"GPUS": "8", "JAX_PLATFORMS": "cpu"}, ["", "", ""]),
    ],
)
def test_processes_share_the_gpus(
    tmp_path: Path, count: int, more: dict[str, str], shares: list[str]
) -> None:
    stubs = Stubs(tmp_path, "play() { :; }")
    assert stubs.run("local.sh", str(count), *RUN, **more)[0] == 0
    assert [stubs.calls(index)[0][2] for index in range(count)] == shares


# `go` removes the disk with the run directory, and `back` restores it.
AWAY = """
go() { mv run away; }
back() { setsid bash -c 'sleep 3; mv away run' >/dev/null 2>&1 & }
"""


@pytest.mark.parametrize(
    ("plan", "starts", "missing"),
    [
        ("play() { save 18; go; exit 75; }", 1, "run does not exist now: is its disk mounted?"),
        # The directory exists, such as the one below a mount point.
        (
            "play() { (($2 == 1)) && save 18 || { go; mkdir run; }; exit 75; }",
            2,
            "run has no checkpoint now (before: checkpoint 18): is its disk mounted?",
        ),
    ],
)
def test_a_run_without_its_disk_does_not_start_from_scratch(
    tmp_path: Path, plan: str, starts: int, missing: str
) -> None:
    stubs = Stubs(tmp_path, AWAY + plan)
    code, _, err = stubs.run("local.sh", "1", *RUN, MAX_RESTARTS="3")
    assert code == 1
    assert len(stubs.calls(0)) == starts
    assert (tmp_path / "run").exists() == (starts == 2)
    # The second start counts as a restart without a new checkpoint.
    assert err.count(f"{missing} Not starting from scratch") == 4 - starts
    assert "giving up" in err
    assert "restarts in a row" not in err


@pytest.mark.parametrize(("argument", "was_there"), [((), False), (("--doctor",), True)])
def test_a_rejected_start_or_a_check_leaves_no_empty_folder(
    tmp_path: Path, argument: tuple[str, ...], was_there: bool
) -> None:
    stubs = Stubs(
        tmp_path, f"play() {{ [[ -d new/deep ]] || exit 1; exit {0 if argument else 2}; }}"
    )
    if was_there:
        (tmp_path / "new").mkdir()
    code, _, err = stubs.run("local.sh", "1", "--output-dir", "new/deep", *argument)
    assert code == (0 if argument else 2), err
    assert not (tmp_path / "new" / "deep").exists()
    assert (tmp_path / "new").exists() == was_there


def test_a_run_resumes_when_its_disk_is_back(tmp_path: Path) -> None:
    plan = "play() { (($2 == 1)) || exit 0; save 18; go; back; exit 75; }"
    stubs = Stubs(tmp_path, AWAY + plan)
    code, _, err = stubs.run("local.sh", "1", *RUN, RESTART_DELAY_S="1")
    assert code == 0, err
    assert len(stubs.calls(0)) == 2
    assert "is its disk mounted?" in err
    assert (tmp_path / "run" / "checkpoints" / "18.json").is_file()


def test_a_suspect_checkpoint_is_not_an_unavailable_disk(tmp_path: Path) -> None:
    change = "mkdir -p run/suspect; mv run/checkpoints run/suspect"
    plan = f"play() {{ (($2 < 3)) || exit 0; (($2 == 1)) && save 18 || {{ {change}; }}; exit 75; }}"
    stubs = Stubs(tmp_path, plan)
    code, _, err = stubs.run("local.sh", "1", *RUN)
    assert code == 0, err
    assert "mounted" not in err


def staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_dir: str | None) -> Path:
    """Returns the folder in which a run in a bucket has its files on this host."""
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return remote.stage("s3://bucket/one", cache.path_of(cache_dir))


@pytest.mark.parametrize(
    ("arguments", "cache_dir"),
    [
        (("--config", "demo", "--data.cache_dir=s3://bucket/cache"), "s3://bucket/cache"),
        (("--config", "own.py"), "gs://bucket/of_config"),
    ],
)
def test_a_run_in_a_bucket_may_be_interrupted_any_number_of_times(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    cache_dir: str | None,
) -> None:
    """Its checkpoints are watched in the folder of this host's cache that the run uses."""
    (tmp_path / "own.py").write_text(
        "from jaxtrain import config\n"
        "run = config.load('demo').override({'data.cache_dir': 'gs://bucket/of_config'})\n"
    )
    folder = staged(tmp_path, monkeypatch, cache_dir) / "checkpoints"
    plan = f'play() {{ mkdir -p "{folder}"; touch "{folder}/$2.json"; (($2 == 4)) || exit 75; }}'
    stubs = Stubs(tmp_path, plan)
    more = {"JAXTRAIN_CACHE": str(tmp_path / "cache"), "MAX_RESTARTS": "1"}
    code, _, err = stubs.run("local.sh", "1", *arguments, "--output-dir=s3://bucket/one", **more)
    assert code == 0, err
    assert len(stubs.calls(0)) == 4
    assert "(newest: 3)" in err


def test_a_run_in_a_bucket_restarts_without_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = staged(tmp_path, monkeypatch, None)
    save = f'mkdir -p "{folder}/checkpoints"; touch "{folder}/checkpoints/18.json"'
    plan = (
        f'play() {{ (($2 == 1)) && {{ {save}; }} || rm -rf "{folder}"; (($2 == 3)) || exit 75; }}'
    )
    stubs = Stubs(tmp_path, plan)
    more = {"JAXTRAIN_CACHE": str(tmp_path / "cache")}
    arguments = ("1", "--config", "demo", "--output-dir", "s3:/bucket//one/")
    code, _, err = stubs.run("local.sh", *arguments, **more)
    assert code == 0, err
    assert len(stubs.calls(0)) == 3
    assert "mounted" not in err
