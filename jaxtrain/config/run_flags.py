"""The flags of a run that are not config fields; a test freezes this list."""

import dataclasses
from typing import Annotated

UNTYPED = {"typed": False}
"""Metadata of a field that is neither a flag nor a positional argument."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFlags:
    """What a command line sets for one run, beside the fields of its config.

    Attributes:
        overrides: the flags of the config, with their values.
        arguments: the command line, from which later commands are built; () without one.
    """

    config: Annotated[str, "NAME"] = ""
    """a shipped config, or the path of a .py file"""
    output_dir: Annotated[str | None, "DIR"] = None
    """run directory, or s3:// or gs:// (default: output/NAME/<UTC time>)"""
    resume: Annotated[str | None, "latest|STEP|PATH"] = None
    """resume from the latest checkpoint, from a step, or from another run"""
    again: bool = False
    """continue what was begun in --output-dir, if anything; launchers add it to a restart"""
    simulate_devices: Annotated[int | None, "N"] = None
    """run on N virtual CPU devices, to try a mesh without GPUs"""
    debug: bool = False
    """check for NaNs, disable buffer donation, log collectives"""
    profile: Annotated[str | None, "START:STOP"] = None
    """write a profiler trace of these steps"""
    track: Annotated[tuple[str, ...], "NAME"] = ()
    """also record the run with wandb, trackio, or mlflow; repeat the flag for several"""
    overrides: tuple[str, ...] = dataclasses.field(default=(), metadata=UNTYPED)
    arguments: tuple[str, ...] = dataclasses.field(default=(), metadata=UNTYPED)


FLAGS = {
    f"--{field.name.replace('_', '-')}": field.name
    for field in dataclasses.fields(RunFlags)
    if field.metadata != UNTYPED
}
"""As typed -> field."""
ONE_RUN_ONLY = ("--output-dir", "--resume", "--again", "--profile", "--debug")
"""Flags that commands for later runs do not repeat."""
