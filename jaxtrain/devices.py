"""What the GPUs of this host say about themselves while they work: memory held, time busy."""

import contextlib
import shutil
import subprocess
import threading
from collections.abc import Mapping

import jax

GIB = 2**30

_QUERY = ("--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=1000")


def memory_gib() -> float | None:
    """Most memory that a device of this process held so far, GiB; None where jax cannot say (CPU).

    The allocator keeps this peak since the start of the process; it cannot be reset.
    """
    peaks = [
        stats["peak_bytes_in_use"]
        for stats in (device.memory_stats() for device in jax.local_devices())
        if stats and "peak_bytes_in_use" in stats
    ]
    return max(peaks) / GIB if peaks else None


def driver_version() -> str | None:
    """The NVIDIA driver's version; None where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    ended = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return ended.stdout.strip() or None


class Utilization:
    """Share of the time that this host's GPUs ran a kernel, sampled once a second by nvidia-smi.

    Says nothing where there is no nvidia-smi.

    Args:
        environment: ``os.environ``; CUDA_VISIBLE_DEVICES in it limits what is sampled.
        platform: of the run's devices; only "gpu" is sampled.
    """

    def __init__(self, environment: Mapping[str, str], platform: str) -> None:
        self._sum, self._count = 0.0, 0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        program = shutil.which("nvidia-smi") if platform == "gpu" else None
        if program is None:
            return
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        chosen = (f"--id={visible}",) if visible else ()
        self._process = subprocess.Popen(
            [program, *_QUERY, *chosen],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._thread = threading.Thread(target=self._listen, name="nvidia-smi", daemon=True)
        self._thread.start()

    def share(self) -> float | None:
        """Mean over the GPUs and the time since the last call, in [0, 1]; None without a sample."""
        with self._lock:
            mean = self._sum / self._count / 100 if self._count else None
            self._sum, self._count = 0.0, 0
        return mean

    def close(self) -> None:
        """Ends nvidia-smi."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._thread.join()

    def _listen(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with contextlib.suppress(ValueError), self._lock:  # "[N/A]" on some cards
                    self._sum += float(line)
                    self._count += 1
