"""``jaxtrain bench``: how fast a config starts, steps, loads and saves on the devices at hand."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from jaxtrain import config, config_files
from jaxtrain.bench import report, sweep
from jaxtrain.bench.request import Request
from jaxtrain.errors import InputError

_TIMEOUT_S = 3600.0
PARTS = ("steps", "trace", "pipeline", "save", "ceilings")


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
        return _ceilings(parser, arguments)
    try:
        flags, overrides = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise InputError(f"{error}; see jaxtrain bench --help") from None
    if not flags.config:
        names = ", ".join(config_files.names())
        raise InputError(f"--config is missing; the configs are: {names}")
    run = config.load(flags.config, overrides)
    points = sweep.points(run, flags.sweep) if flags.sweep else {}
    _check_output(flags.json)

    print("measuring a cold start, steps, pipeline and saves ...", flush=True)
    with tempfile.TemporaryDirectory() as compiled:
        findings = _request(flags, overrides, compiled, PARTS).findings()
        if "failure" not in findings:
            print("measuring a warm start ...", flush=True)
            warm = _request(flags, overrides, compiled, ()).findings()
            rows = warm.get("rows", {})
            findings["rows"] |= {
                name.replace("start/", "start/warm_"): value for name, value in rows.items()
            }
    findings = report.complete(findings | {"sweep": {}}, arguments)
    if flags.json and points:  # what is known so far, should the sweep be ended
        report.write(findings, flags.json)
    findings["sweep"] = _sweep(flags, overrides, points)
    return _finish(findings, flags.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxtrain bench",
        usage="jaxtrain bench --config NAME [flags] [--section.field value ...]\n"
        "       jaxtrain bench ceilings [--json FILE]",
        description=__doc__,
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )
    add = parser.add_argument
    add("--config", metavar="NAME", help="a shipped config, or a path to a .py file")
    add("--json", metavar="FILE", type=Path, help="write all findings there too")
    add("--seconds", type=float, default=20.0, help="for steps, and for the pipeline (20)")
    add("--simulate-devices", metavar="N", type=int, help="N virtual CPU devices")
    add("--sweep", choices=sweep.KINDS, help="then this curve, a process for each point")
    return parser


def _request(
    flags: argparse.Namespace, overrides: list[str], compiled: str, parts: tuple[str, ...]
) -> Request:
    return Request(
        config=flags.config,
        overrides=tuple(overrides),
        simulate_devices=flags.simulate_devices,
        parts=parts,
        seconds=flags.seconds,
        compiled=compiled,
        timeout_s=_TIMEOUT_S,
    )


def _sweep(
    flags: argparse.Namespace, overrides: list[str], points: dict[str, tuple[str, ...]]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for label, changes in points.items():
        print(f"measuring {flags.sweep} {label} ...", flush=True)
        with tempfile.TemporaryDirectory() as compiled:
            request = _request(flags, [*overrides, *changes], compiled, ("steps",))
            found[label] = request.findings()
    return found


def _ceilings(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    flags = parser.parse_args(arguments[1:])
    _check_output(flags.json)
    import dataclasses

    import jax

    from jaxtrain import devices
    from jaxtrain.bench import ceilings

    first = jax.local_devices()[0]
    found = {
        f"ceilings/{name}": value for name, value in dataclasses.asdict(ceilings.measure()).items()
    }
    device = {
        "kind": first.device_kind,
        "count": 1,
        "platform": first.platform,
        "platform_version": first.client.platform_version,
        "driver": devices.driver_version(),
    }
    findings = {"rows": found, "notes": {}, "operations": [], "device": device, "sweep": {}}
    return _finish(report.complete(findings, arguments), flags.json)


def _finish(findings: dict[str, Any], path: Path | None) -> int:
    if "device" in findings:
        print(f"\n{report.heading(findings)}")
    print(report.table(findings))
    if findings["sweep"]:
        summaries = {label: sweep.summary(one) for label, one in findings["sweep"].items()}
        rates = {label: found[0] for label, found in summaries.items()}
        memory = {label: found[1] for label, found in summaries.items()}
        print("\n" + report.curve("speed", rates, "examples/s"))
        print("\n" + report.curve("memory", memory, "GiB a device"))
    if path:
        report.write(findings, path)
        print(f"\nwritten to {path}")
    return 1 if "failure" in findings else 0


def _check_output(path: Path | None) -> None:
    if path is not None and not path.absolute().parent.is_dir():
        raise InputError(f"--json {path}: {path.absolute().parent} is no folder; make it first")
