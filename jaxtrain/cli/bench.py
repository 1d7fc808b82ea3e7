"""``jaxtrain bench``: measures a config on this machine's devices."""

import shlex
import tempfile
from pathlib import Path
from typing import Any

from jaxtrain import config, terminal
from jaxtrain.bench import report, request
from jaxtrain.bench.request import MEASUREMENTS
from jaxtrain.cli import commands
from jaxtrain.cost import efficiency
from jaxtrain.errors import InputError
from jaxtrain.storage import addresses, atomic


def main(flags: commands.Bench) -> int:
    """Runs the command and returns its exit code."""
    overrides = [*flags.overrides]
    run = config.load(flags.config, overrides)
    if flags.efficiency is not None:
        atomic.check_writable("--efficiency", flags.efficiency)
        if run.mesh.devices > 1:
            raise InputError(
                f"--efficiency measures one device, but the mesh has {run.mesh.devices}: add "
                "--mesh.data 1 --mesh.fsdp 1, and a batch that fits"
            )

    def keep(findings: dict[str, Any]) -> dict[str, Any]:
        findings = addresses.scrubbed(report.complete(findings, list(flags.arguments)))
        if flags.json:
            report.write(findings, flags.json)
        return findings

    terminal.out("measuring a cold start, steps, pipeline, and saves ...")
    with tempfile.TemporaryDirectory() as compiled:
        findings = keep(_measured(flags, overrides, compiled, MEASUREMENTS))
        if "failure" not in findings:
            terminal.out("measuring a warm start ...")
            warm = _measured(flags, overrides, compiled, ())
            findings["rows"] |= {
                name.replace("start/", "start/warm_"): value
                for name, value in warm.get("rows", {}).items()
            }
    code = _finish(keep(findings))
    if flags.json:
        terminal.out(f"\nwritten to {flags.json}")
    if flags.efficiency is not None:
        _write_efficiency(findings, flags, overrides, flags.efficiency)
    return code


def _write_efficiency(
    findings: dict[str, Any], flags: commands.Bench, overrides: list[str], path: Path
) -> None:
    rows: dict[str, Any] = findings.get("rows", {})
    if "synthetic/of_serial_bound" not in rows:
        notes: dict[str, str] = findings.get("notes", {})
        why = findings.get("failure") or notes.get("steps") or notes.get("ceilings")
        if why is None:
            why = f"plan does not know the peaks of {findings['device']['kind']}"
        raise InputError(f"{path} not written: {why}")
    arguments = addresses.scrubbed([flags.config, *overrides])
    measured = efficiency.Efficiency(
        device=findings["device"]["kind"],
        config=shlex.join(arguments),
        jax=findings["versions"]["jax"],
        of_serial_bound=rows["synthetic/of_serial_bound"],
    )
    efficiency.write(path, measured)
    terminal.out(f"efficiency written to {path}")


def _measured(
    flags: commands.Bench, overrides: list[str], compiled: str, measurements: tuple[str, ...]
) -> dict[str, Any]:
    return request.findings(
        flags.config,
        overrides,
        compiled=compiled,
        measurements=measurements,
        seconds=flags.seconds,
        simulate_devices=flags.simulate_devices,
    )


def _finish(findings: dict[str, Any]) -> int:
    if "device" in findings:
        terminal.out(f"\n{report.heading(findings)}")
    terminal.out(report.table(findings))
    return 1 if "failure" in findings or findings["failed"] else 0
