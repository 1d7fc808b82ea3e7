"""Exchanges between three hosts, one of which has a slow network, by doctor and during a run.

Needs root, so it is not part of the default suite: pass the file.
"""

import contextlib
import subprocess
import sys
from pathlib import Path

from launch.hosts import Host, require, run, three_hosts
from program import CHECKOUT, TINY_MLM, command, environment, write_corpus

PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
# What doctor does once its processes are connected.
EXCHANGE = """
import socket, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize("n1:9911", 3, int(sys.argv[1]))
from jaxtrain.distributed import key_value
from jaxtrain.doctor import collective
for found in collective.links(jax.devices(), key_value.of_run(), socket.gethostname()):
    print(found.level, found.seen, flush=True)
"""
# Links are measured at every logged step: these are too close together for 1% of the time.
OFTEN = """
import sys, threading, time
def later():
    while "jaxtrain.training.session" not in sys.modules:
        time.sleep(0.01)
    time.sleep(0.5)
    from jaxtrain.training import slow_process
    slow_process._BUDGET = 100.0
threading.Thread(target=later, daemon=True).start()
"""


def _slow_down(host: Host) -> None:
    """Limits what a host sends to 40 Mbit/s."""
    limit = ("rate", "40mbit", "burst", "64kb", "latency", "2s")
    run(*host.command("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit))


def test_doctor_names_the_host_with_the_slow_network(tmp_path: Path) -> None:
    require(PROGRAMS)
    with three_hosts(tmp_path) as hosts:
        _slow_down(hosts[2])
        started = [
            subprocess.Popen(
                host.command(sys.executable, "-c", EXCHANGE, str(number)),
                env=environment(tmp_path),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for number, host in enumerate(hosts)
        ]
        outputs = [process.communicate(timeout=280)[0] for process in started]
    for output in outputs:
        (named,) = [line for line in output.splitlines() if "exchange" in line]
        assert named.startswith("warning host n3 exchanges data with others at 0.00"), outputs


def test_a_run_names_the_host_whose_network_becomes_slow(tmp_path: Path) -> None:
    """Two measurements, at the two logged steps after the network became slow, suffice."""
    require(PROGRAMS)
    (tmp_path / "often").mkdir()
    (tmp_path / "often" / "sitecustomize.py").write_text(OFTEN)
    flags = (
        *(*TINY_MLM, "--simulate-devices", 6, "--mesh.fsdp", 6, "--data.batch_size", 12),
        *("--loop.steps", 2000, "--loop.log_every", 10, "--checkpoint.every", 2000),
        *("--data.path", write_corpus(tmp_path), "--output-dir", tmp_path / "run"),
    )
    lines: list[str] = []
    logged: int | None = None
    # The hosts end first, and with them the runs: a signal to nsenter would not reach a run.
    with contextlib.ExitStack() as stack, three_hosts(tmp_path) as hosts:
        started = [
            subprocess.Popen(
                host.command(*command(*flags)),
                env=environment(
                    tmp_path,
                    PYTHONPATH=f"{tmp_path / 'often'}:{CHECKOUT}",
                    JAX_COORDINATOR_ADDRESS="n1:9911",
                    JAX_NUM_PROCESSES="3",
                    JAX_PROCESS_ID=str(number),
                ),
                stdout=subprocess.DEVNULL if number else subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for number, host in enumerate(hosts)
        ]
        for process in started:
            stack.callback(process.communicate)
        assert started[0].stdout is not None
        for line in started[0].stdout:
            lines.append(line)
            if "slows down the others" in line or logged == 3:
                break
            if line.startswith("step 20/"):
                _slow_down(hosts[2])
                logged = 0
            elif logged is not None and line.startswith("step "):
                logged += 1
    assert lines[-1].startswith(
        "host n3 slows down the others (communication): it exchanges data with other hosts at 0.0"
    ), "".join(lines)
    assert logged is not None
    assert logged <= 2, "".join(lines)
