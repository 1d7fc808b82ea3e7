"""Exchanges between three hosts by doctor, one of which has a slow network.

Needs root, so it is not part of the default suite: pass the file.
"""

import subprocess
import sys
from pathlib import Path

from launch.hosts import Host, require, run, three_hosts
from program import environment

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
from jaxtrain.doctor import collectives
for found in collectives.links(jax.devices(), key_value.of_run(), socket.gethostname()):
    print(found.level, found.seen, flush=True)
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
        print(output)
        (named,) = [line for line in output.splitlines() if "exchange" in line]
        assert named.startswith("warning hosts that exchange data slowly"), outputs
        assert named.endswith("; host n3 is slow"), outputs
