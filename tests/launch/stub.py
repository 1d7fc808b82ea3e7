"""Stand-ins for the programs that launchers call: Python, srun, scontrol, scancel and ssh."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
LAUNCH = CHECKOUT / "launch"
RECORDED = CHECKOUT / "tests" / "fixtures" / "launch"

# Replaces Python. `plan` defines play INDEX ATTEMPT, which runs instead; calls are recorded. With
# BUCKETS, buckets are folders there.
PYTHON = """\
#!/usr/bin/env bash
[[ $1 != -c ]] || exec "$REAL_PYTHON" "$@"
[[ $2 != jaxtrain.supervisor ]] || exec "$REAL_PYTHON" -c 'import os, runpy, sys
sys.executable = os.environ["STUBS"] + "/python"
if os.environ.get("BUCKETS"):
    import obstore.store
    from jaxtrain.storage.bucket import Bucket
    Bucket._opened = lambda bucket: obstore.store.LocalStore(
        os.environ["BUCKETS"] + bucket.url.partition(":/")[2], mkdir=True)
runpy.run_module("jaxtrain.supervisor", run_name="__main__", alter_sys=True)' "${@:3}"
index=${JAX_PROCESS_ID:-${SLURM_PROCID:-${RANK:-0}}}
touch "$STUBS/calls.$index"
attempt=$(($(wc -l <"$STUBS/calls.$index") + 1))
{
    printf '%s|' "${JAX_COORDINATOR_ADDRESS-}" "${JAX_NUM_PROCESSES-}"
    printf '%s|' "${JAX_LOCAL_DEVICE_IDS-}" "$@"
    echo
} >>"$STUBS/calls.$index"
save() {
    mkdir -p run/checkpoints && echo {} >"run/checkpoints/$1.json"
    echo '{"jaxtrain": "run", "format": 6, "id": "0123456789abcdef"}' >run/jaxtrain-run.json
}
stopped() { touch "$STUBS/ready.$index"; while :; do sleep 0.05; done; }
source "$STUBS/plan"
play "$index" "$attempt"
"""

# Two tasks, with the variables that a real srun has set for them.
SRUN = """\
#!/usr/bin/env bash
echo "srun $*" >>"$STUBS/slurm"
while [[ $1 == --* ]]; do
    shift
done
for task in 0 1; do
    env $(grep -v -e '(' "$RECORDED/slurm-two.$task.env") "$@" &
    pids[task]=$!
done
printf '%s\\n' "${pids[@]}" >"$STUBS/tasks"
code=0
for pid in "${pids[@]}"; do
    one=0
    wait "$pid" || one=$?
    ((one <= code)) || code=$one
done
exit "$code"
"""
SCONTROL = """\
#!/usr/bin/env bash
echo "scontrol $*" >>"$STUBS/slurm"
[[ $1 == requeue ]] || printf '   JobState=%s Reason=None\\n' "$(cat "$STUBS/state")"
"""
SCANCEL = """\
#!/usr/bin/env bash
echo "scancel $*" >>"$STUBS/slurm"
kill -TERM $(cat "$STUBS/tasks")
"""

# Runs the command here, as sshd does for "-tt": in a session with a terminal, which closes when
# this process is killed. The host "gone" does not respond.
SSH = f"""\
#!{sys.executable}
import os, pty, sys, threading
arguments = sys.argv[1:]
options, local = [], "true"
while arguments[0].startswith("-"):
    options.append(arguments.pop(0))
    if options[-1] in ("-o", "-p", "-i", "-e"):
        value = arguments.pop(0)
        local = value.removeprefix("LocalCommand=") if value.startswith("Local") else local
if "-G" in options:
    sys.exit(print("hostname 127.0.0.1"))
host, command = arguments
if host == "gone":
    sys.exit(print("ssh: connect to host gone: Connection refused", file=sys.stderr) or 255)
os.system(local)
with open(os.environ["STUBS"] + "/ssh." + host, "a") as file:
    file.write(str(os.getpid()) + "\\n")
# A host has an environment of its own.
for name in list(os.environ):
    if name.startswith(("NCCL_", "JAXTRAIN_")) or name == "PYTHON":
        del os.environ[name]
if "-tt" not in options:
    os.execvp("sh", ["sh", "-c", command])
process, terminal = pty.fork()
if process == 0:
    os.execvp("sh", ["sh", "-c", command])

def forward():
    while piece := os.read(0, 1000):
        os.write(terminal, piece)

threading.Thread(target=forward, daemon=True).start()
try:
    while piece := os.read(terminal, 1000):
        os.write(1, piece)
except OSError:  # all have closed it
    pass
code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
os._exit(code if code >= 0 else 128 - code)
"""
NVIDIA_SMI = """\
#!/usr/bin/env bash
for gpu in $(seq 1 "$GPUS"); do echo "GPU $gpu: NVIDIA H100 80GB HBM3 (UUID: GPU-$gpu)"; done
"""


class Stubs:
    """A directory in which launchers run, with the stand-ins.

    Args:
        plan: bash that defines ``play INDEX ATTEMPT``.
    """

    def __init__(self, directory: Path, plan: str) -> None:
        self.directory = directory
        self.stubs = directory / "stubs"
        self.stubs.mkdir()
        for name, text in {
            "python": PYTHON,
            "srun": SRUN,
            "scontrol": SCONTROL,
            "scancel": SCANCEL,
            "ssh": SSH,
            "nvidia-smi": NVIDIA_SMI,
        }.items():
            (self.stubs / name).write_text(text)
            (self.stubs / name).chmod(0o755)
        (self.stubs / "plan").write_text(plan)
        (directory / "home").mkdir()
        (directory / "launch").symlink_to(LAUNCH)  # the directory is a checkout
        (self.stubs / "state").write_text("RUNNING")

    def environment(self, **more: str) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(
                ("JAX_", "JAXTRAIN_", "XDG_", "SLURM_", "NCCL_", "CUDA_", "WORLD_", "RANK")
            )
        }
        return kept | {
            "PATH": f"{self.stubs}:{os.environ['PATH']}",
            "HOME": str(self.directory / "home"),
            "PYTHON": str(self.stubs / "python"),
            "REAL_PYTHON": sys.executable,
            "STUBS": str(self.stubs),
            "RECORDED": str(RECORDED),
            "GPUS": "0",
            "RESTART_DELAY_S": "0",
            "GRACE_S": "1",
            "KILL_S": "1",
            **more,
        }

    @contextlib.contextmanager
    def start(self, script: str, *arguments: str, **more: str) -> "Iterator[subprocess.Popen[str]]":
        """Runs a launcher; it ends with the block at the latest."""
        launcher = subprocess.Popen(
            # Bash cannot trap signals ignored at its start, as when tests run in the background.
            ["env", "--default-signal=HUP,INT,TERM", str(LAUNCH / script), *arguments],
            cwd=self.directory,
            env=self.environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield launcher
        finally:
            if launcher.poll() is None:
                launcher.terminate()  # it ends its processes
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.communicate(timeout=30)
            launcher.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.communicate(timeout=30)

    def run(self, script: str, *arguments: str, **more: str) -> tuple[int, str, str]:
        """Runs a launcher; returns its exit code, standard output and standard error."""
        with self.start(script, *arguments, **more) as launcher:
            out, err = launcher.communicate(timeout=120)
            return launcher.returncode, out, err

    def calls(self, index: int) -> list[list[str]]:
        """The calls of process ``index``: address, count, devices, and its arguments."""
        path = self.stubs / f"calls.{index}"
        return [line.split("|")[:-1] for line in path.read_text().splitlines()]

    def slurm(self) -> str:
        return (self.stubs / "slurm").read_text()
