"""local.sh and the code that all launchers share, with a stand-in for Python."""

import signal
import time
from pathlib import Path

import pytest
from checkpoint import small_checkpoint
from launch.stub import Stubs
from launch.test_slurm import BATCH
from program import lock_held, wait_for

from jaxtrain.checkpoint import remote
from jaxtrain.storage import cache

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


def test_all_starts_have_the_users_arguments_and_one_name(tmp_path: Path) -> None:
    """A start with ``--resume`` that has recorded nothing must be repeated as it was."""
    stubs = Stubs(tmp_path, "play() { echo $JAXTRAIN_LAUNCH >>names; (($2 > 1)) || exit 75; }")
    odd = ("--output-dir=a b", "--data.path", 'it\'s $HOME "x" *', "--resume", "400")
    assert stubs.run("local.sh", "1", *odd)[0] == 0
    assert [call[5:] for call in stubs.calls(0)] == [[*odd]] * 2
    assert (tmp_path / "a b").is_dir()
    first, second = (tmp_path / "names").read_text().split()
    assert first == second
    assert stubs.run("local.sh", "1", *odd)[0] == 0
    assert (tmp_path / "names").read_text().split()[-1] != first


def test_help_is_the_usage(tmp_path: Path) -> None:
    code, out, err = Stubs(tmp_path, "play() { :; }").run("local.sh", "--help")
    assert (code, err) == (0, "")
    assert out == "usage: launch/local.sh N --config NAME --output-dir DIR ...\n"


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
    change = (
        "mkdir -p run/aside; mv run/checkpoints/18.json run/aside/18-0123456789abcdef.json; "
        "echo suspect: step 20 > run/aside/18-0123456789abcdef.txt"
    )
    plan = f"play() {{ (($2 < 3)) || exit 0; (($2 == 1)) && save 18 || {{ {change}; }}; exit 75; }}"
    stubs = Stubs(tmp_path, plan)
    code, _, err = stubs.run("local.sh", "1", *RUN)
    assert code == 0, err
    assert "mounted" not in err


def test_a_run_in_a_bucket_is_judged_by_its_bucket(tmp_path: Path) -> None:
    """Not by this disk, which may be new, and which may have what was never uploaded."""
    folder = tmp_path / "buckets/bucket/one/checkpoints"
    stage = remote.stage("s3://bucket/one", tmp_path / "cache") / "checkpoints"
    plan = f"""play() {{
        mkdir -p "{folder}" "{stage}"
        touch "{stage}/$2.json"
        (($2 > 3)) || touch "{folder}/$2.json"
        exit 75
    }}"""
    stubs = Stubs(tmp_path, plan)
    code, _, err = stubs.run(
        *("local.sh", "1", "--config", "demo", "--output-dir", "s3:/bucket//one/"),
        BUCKETS=str(tmp_path / "buckets"),
        JAXTRAIN_CACHE=str(tmp_path / "cache"),
        MAX_RESTARTS="1",
    )
    assert code == 1
    assert len(stubs.calls(0)) == 4
    assert "1 restarts in a row produced no new checkpoint (newest: 3)" in err


def test_a_run_in_a_bucket_may_lose_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is in the cache that the run uses, also in one of the config."""
    (tmp_path / "own.py").write_text(
        "from jaxtrain import config\n"
        "run = config.load('demo').override({'data.cache_dir': 'gs://bucket/of_config'})\n"
    )
    bucket = tmp_path / "buckets/bucket/one/checkpoints"
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    stage = remote.stage("s3://bucket/one", cache.path_of("gs://bucket/of_config"))
    plan = f"""play() {{
        (($2 > 1)) || [[ -d "{stage}" ]] || exit 2
        mkdir -p "{bucket}"
        touch "{bucket}/18.json"
        rm -rf "{stage}"
        (($2 == 3)) || exit 75
    }}"""
    stubs = Stubs(tmp_path, plan)
    code, _, err = stubs.run(
        *("local.sh", "1", "--config", "own.py", "--output-dir", "s3://bucket/one"),
        BUCKETS=str(tmp_path / "buckets"),
        JAXTRAIN_CACHE=str(tmp_path / "cache"),
    )
    assert code == 0, err
    assert len(stubs.calls(0)) == 3
    assert "mounted" not in err


@pytest.mark.long  # it waits 70 s for the bucket
def test_an_unavailable_bucket_does_not_count_as_progress(tmp_path: Path) -> None:
    plan = 'play() { rm -rf "$BUCKETS"; touch "$BUCKETS"; exit 75; }'
    stubs = Stubs(tmp_path, plan)
    folder = tmp_path / "buckets/bucket/one/checkpoints"
    folder.mkdir(parents=True)
    (folder / "5.json").touch()
    code, _, err = stubs.run(
        *("local.sh", "1", "--config", "demo", "--output-dir", "s3://bucket/one"),
        BUCKETS=str(tmp_path / "buckets"),
        JAXTRAIN_CACHE=str(tmp_path / "cache"),
        MAX_RESTARTS="1",
    )
    assert code == 1
    assert "local.sh: cannot look for checkpoints: " in err
    assert "1 restarts in a row produced no new checkpoint (newest: 5)" in err


def test_a_folder_of_a_user_is_refused_before_a_log_is_written(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { :; }")
    (tmp_path / "run/data").mkdir(parents=True)
    code, _, err = stubs.run("local.sh", "2", *RUN)
    assert code == 2
    assert "--output-dir run is not empty and not a run of this version" in err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["data"]
    assert not list(stubs.stubs.glob("calls.*"))


def test_a_second_launcher_of_a_run_is_refused(tmp_path: Path) -> None:
    """The checkpoints of the first would count as its own progress."""
    stubs = Stubs(tmp_path, "play() { :; }")
    small_checkpoint.mark(tmp_path / "run")
    with lock_held(tmp_path / "run") as first:
        for script, more in (
            ("local.sh", {}),
            ("platform.sh", {"WORLD_SIZE": "2", "RANK": "0"}),
            ("pod.sh", {}),
            ("slurm.sbatch", BATCH),
        ):
            arguments = ("1", *RUN) if script == "local.sh" else RUN
            code, _, err = stubs.run(script, *arguments, **more, SAVE_S="0")
            assert code == 2, err
            assert f"error: another run is using run (process {first.pid} on " in err
        assert not list(stubs.stubs.glob("calls.*"))
        # Where it is not known yet, the run finds out: this node does not start process 0, or
        # the process of an earlier start may still be ending.
        for script, more in (
            ("platform.sh", {"WORLD_SIZE": "2", "RANK": "1"}),
            ("pod.sh", {"RESTARTS": "1"}),
            ("slurm.sbatch", BATCH | {"SLURM_RESTART_COUNT": "1"}),
        ):
            code, _, err = stubs.run(script, *RUN, **more, SAVE_S="0")
            assert code == 0, err
        code, _, err = stubs.run("local.sh", "1", "--doctor", *RUN, SAVE_S="0")
        assert code == 0, err
    assert stubs.run("local.sh", "1", *RUN)[0] == 0


def test_a_launcher_waits_for_a_run_that_is_saving(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { :; }")
    small_checkpoint.mark(tmp_path / "run")
    with lock_held(tmp_path / "run") as first, stubs.start("local.sh", "1", *RUN) as launcher:
        assert launcher.stderr is not None
        assert "waiting until the run in run ends (process" in launcher.stderr.readline()
        first.kill()
        launcher.communicate(timeout=60)
        assert launcher.returncode == 0
    assert len(stubs.calls(0)) == 1
