"""Measures how fast a config starts, steps, loads data, and saves, on this machine's devices."""

import argparse
import os
import shlex
import tempfile
from pathlib import Path
from typing import Any

from jaxtrain import config, terminal
from jaxtrain.bench import report, request
from jaxtrain.bench.request import PARTS
from jaxtrain.cli import command_line
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.planning import efficiency
from jaxtrain.storage import addresses, atomic

_LONGEST_S = 1200.0  # twice this, and what else is measured, ends within the time limit
_CEILINGS_HELP = "Measures the matmul and memory-bandwidth peaks of the first device."


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code.

    Raises:
        InputError: wrong use.
    """
    parser = _parser()
    if not arguments or arguments[0] in ("--help", "-h"):
        parser.print_help()
        return 0
    if arguments[0] == "ceilings":
        return _ceilings(arguments)
    flags, overrides = command_line.parse(parser, arguments)
    run = config.load(flags.config, overrides)
    if not 0 < flags.seconds <= _LONGEST_S:
        raise InputError(
            f"--seconds {flags.seconds:g}: use more than 0, and at most {_LONGEST_S:g}"
        )
    points = request.batch_sizes(run) if flags.sweep else {}
    atomic.check_writable("--json", flags.json)
    if flags.efficiency is not None:
        atomic.check_writable("--efficiency", flags.efficiency)
        if run.mesh.devices > 1:
            raise InputError(
                f"--efficiency measures one device, but the mesh has {run.mesh.devices}: add "
                "--mesh.data 1 --mesh.fsdp 1, and a batch that fits"
            )

    def keep(findings: dict[str, Any]) -> dict[str, Any]:
        findings = addresses.scrubbed(report.complete(findings, arguments))
        if flags.json:
            report.write(findings, flags.json)
        return findings

    terminal.out("measuring a cold start, steps, pipeline, and saves ...")
    with tempfile.TemporaryDirectory() as compiled:
        findings = keep(_measured(flags, overrides, compiled, PARTS) | {"sweep": {}})
        if "failure" not in findings:
            terminal.out("measuring a warm start ...")
            warm = _measured(flags, overrides, compiled, ())
            findings["rows"] |= {
                name.replace("start/", "start/warm_"): value
                for name, value in warm.get("rows", {}).items()
            }
    for label, changes in points.items():
        terminal.out(f"measuring {flags.sweep} {label} ...")
        findings["sweep"][label] = _point(flags, [*overrides, *changes])
        keep(findings)
    code = _finish(keep(findings), flags.json)
    if flags.efficiency is not None:
        _write_efficiency(findings, flags, overrides)
    return code


def _parser() -> argparse.ArgumentParser:
    usage = (
        "jaxtrain bench --config NAME [flags] [--section.field VALUE ...]\n"
        "       jaxtrain bench ceilings [--json FILE]"
    )
    parser = command_line.parser("bench", usage, __doc__)
    add = parser.add_argument
    add(
        "--seconds",
        metavar="S",
        type=float,
        default=20.0,
        help="seconds to measure steps, and again to measure the pipeline (default: 20)",
    )
    add("--simulate-devices", metavar="N", type=int, help="measure on N virtual CPU devices")
    add(
        "--sweep",
        choices=("batch",),
        help="also measure other batch sizes",
    )
    add(
        "--efficiency",
        metavar="FILE",
        type=Path,
        help="write the measured fraction of the GPU's peaks to FILE, for plan --efficiency",
    )
    command_line.add_ignored(parser, "--simulate-devices")
    return parser


def _write_efficiency(
    findings: dict[str, Any], flags: argparse.Namespace, overrides: list[str]
) -> None:
    """Writes the measured efficiency to the file.

    Raises:
        InputError: the step could not be measured, or plan does not know the peaks of the device.
    """
    rows: dict[str, Any] = findings.get("rows", {})
    if "synthetic/efficiency" not in rows:
        notes: dict[str, str] = findings.get("notes", {})
        why = findings.get("failure") or notes.get("steps") or notes.get("ceilings")
        if why is None:
            why = f"plan does not know the peaks of {findings['device']['kind']}"
        raise InputError(f"{flags.efficiency} not written: {why}")
    typed = addresses.scrubbed([flags.config, *overrides])
    measured = efficiency.Efficiency(
        device=findings["device"]["kind"],
        config=shlex.join(typed),
        jax=findings["versions"]["jax"],
        efficiency=rows["synthetic/efficiency"],
    )
    efficiency.write(flags.efficiency, measured)
    terminal.out(f"efficiency written to {flags.efficiency}")


def _measured(
    flags: argparse.Namespace, overrides: list[str], compiled: str, parts: tuple[str, ...]
) -> dict[str, Any]:
    return request.findings(
        flags.config,
        overrides,
        compiled=compiled,
        parts=parts,
        seconds=flags.seconds,
        simulate_devices=flags.simulate_devices,
    )


def _point(flags: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as compiled:
        try:
            return _measured(flags, overrides, compiled, ("steps",))
        except (InputError, RunAgain) as error:
            return {"failure": str(error), "detail": ""}


def _ceilings(arguments: list[str]) -> int:
    usage = "jaxtrain bench ceilings [--json FILE]"
    parser = command_line.bare_parser("bench ceilings", usage, _CEILINGS_HELP)
    parser.add_argument("ceilings", help=argparse.SUPPRESS)
    command_line.add_json(parser)
    flags = command_line.parse_all(parser, arguments)
    if flags is None:
        return 0
    atomic.check_writable("--json", flags.json)
    import dataclasses

    import jax

    from jaxtrain.bench import ceilings
    from jaxtrain.distributed import process_group
    from jaxtrain.telemetry import hardware

    process_group.check_accelerator(os.environ)
    first = jax.local_devices()[0]
    found = {
        f"ceilings/{name}": value for name, value in dataclasses.asdict(ceilings.measure()).items()
    }
    device = {
        "kind": first.device_kind,
        "count": 1,
        "platform": first.platform,
        "platform_version": " ".join(first.client.platform_version.split()),
        "driver": hardware.driver().version,
    }
    findings = {
        "rows": found,
        "notes": {},
        "failed": [],
        "operations": [],
        "device": device,
        "sweep": {},
    }
    return _finish(report.complete(findings, arguments), flags.json)


def _finish(findings: dict[str, Any], path: Path | None) -> int:
    if "device" in findings:
        terminal.out(f"\n{report.heading(findings)}")
    terminal.out(report.table(findings))
    if findings["sweep"]:
        terminal.out("\n" + report.sweep(findings["sweep"]))
    if path:
        report.write(findings, path)
        terminal.out(f"\nwritten to {path}")
    return 1 if "failure" in findings or findings["failed"] else 0
