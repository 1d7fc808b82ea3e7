"""``jaxtrain evaluate STUDENT --teacher PATH``: how much of a teacher a student keeps."""

import base64
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxtrain import formats, terminal
from jaxtrain.cli import commands
from jaxtrain.errors import InputError
from jaxtrain.inference import teachers
from jaxtrain.inference.evaluation import distillation, reconstructions
from jaxtrain.inference.evaluation.distillation import AGAINST_TEACHER, CELLS, STUDENT, TEACHER
from jaxtrain.inference.video.autoencoder import Autoencoder
from jaxtrain.reporting import page
from jaxtrain.reporting.markup import element, table
from jaxtrain.reporting.sections import section
from jaxtrain.storage import atomic

_UNITS = {"psnr": " (dB)", "motion error": " (levels)"}
_LISTED = 3  # channels


class Pair(NamedTuple):
    """A student and its teacher."""

    student: Autoencoder
    teacher: teachers.Teacher


def load(flags: commands.Evaluate) -> Pair:
    """Loads both."""
    if len(flags.sources) > 1:
        raise InputError(
            f"--teacher {flags.teacher}: {len(flags.sources)} models given; pass one student"
        )
    if flags.i3d is not None:
        raise InputError(f"--i3d {flags.i3d} does not work with --teacher: omit one of the two")
    teacher = teachers.load(
        str(flags.teacher),
        scaling=flags.teacher_scaling,
        say=terminal.say,
        command="evaluate",
    )
    return Pair(Autoencoder(flags.sources[0], flags.precision, command="evaluate"), teacher)


def frames(pair: Pair, flags: commands.Evaluate, frames: int) -> int:
    """Returns the frames per clip: as given, or else the number nearest to `frames` that fits both.

    Raises:
        InputError: the latents do not stand for the same frames and pixels as the teacher's.
    """
    model = pair.student.model
    if flags.frames is None and flags.protocol is None:
        frames = pair.teacher.nearest_fitting(model.timing, frames)
    pair.teacher.check(f"--teacher {flags.teacher}", model, frames, "--frames")
    return frames


class Table(NamedTuple):
    """A table for the console and the page; its rows have one more cell than its head."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


class Findings(NamedTuple):
    """What was measured.

    Attributes:
        content: the same for ``--json``.
    """

    names: list[str]
    kept: str
    tables: list[Table]
    notes: list[str]
    content: dict[str, Any]

    def text(self, about: str) -> str:
        """Returns what the console shows."""
        lines = [about, *self.names]
        for title, head, rows in self.tables:
            lines += ["", formats.columns([(title, *head), *rows], {0})]
        return "\n".join([*lines, "", *self.notes, "", self.kept])

    def write(self, out: Path, about: str, worst: Sequence[tuple[str, str, bytes]]) -> None:
        """Writes the page of ``--report``.

        Args:
            worst: for each of the clips with the lowest PSNR, its video, a title, and a PNG file.
        """
        blocks = [
            element("p", self.kept, class_="state"),
            *(element("p", line, class_="note") for line in (about, *self.names)),
            *(section(title, table(("", *head), rows)) for title, head, rows in self.tables),
            element("ul", *(element("li", note) for note in self.notes), class_="note"),
        ]
        figures = []
        for _, title, png in worst:
            source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
            figures.append(element("figure", element("img", src=source, alt=title)))
        blocks.append(section("Clips with the lowest PSNR", *figures))
        content = page.without_curves("How much of the teacher the student keeps", blocks)
        atomic.write_whole(out, content.encode(errors="replace"))


def findings(
    meter: reconstructions.Meter, measured: Sequence[reconstructions.ClipMetrics]
) -> Findings:
    """Returns the statistics of clips that a student meter measured, at least one."""
    assert isinstance(meter, distillation.StudentMeter)
    of_cells = reconstructions.evaluation(measured, meter.names)
    alone = distillation.alone(measured)
    names = dict.fromkeys(name for clip in alone for name in clip.values[0])
    of_alone = reconstructions.evaluation(alone, tuple(names))
    latents = meter.latents()
    to_teacher = [name for name in of_cells.estimates if name.startswith(AGAINST_TEACHER)]
    original = [name for name in of_cells.estimates if name not in to_teacher]
    gap = "student - teacher (95%)"
    return Findings(
        names=[f"student: {meter.models[0].source}", f"teacher: {meter.teacher.about}"],
        kept=_kept(of_cells),
        tables=[
            Table("encoder > decoder", (*CELLS, gap), _rows(of_cells, original)),
            Table(
                "compared with the teacher's frames",
                CELLS[1:],
                [(name, *cells[1:-1]) for name, *cells in _rows(of_cells, to_teacher)],
            ),
            Table(
                "each alone", ("teacher", "student", gap), _rows(of_alone, list(of_alone.estimates))
            ),
        ],
        notes=[
            *_of_channels(latents),
            "noise: added to the teacher's latents, in standard deviations of each channel; both "
            "decoders see the same. Smaller clips are the centers of the others.",
        ],
        content={
            "teacher": meter.teacher.about,
            "kept": _fractions(of_cells),
            "cells": list(CELLS),
            "metrics": _content(of_cells),
            "alone": _content(of_alone),
            "latents": {name: values.tolist() for name, values in latents._asdict().items()},
        },
    )


def _rows(measured: reconstructions.Evaluation, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns a row for each metric; its last cell is the last column minus the first."""
    rows = []
    for name in names:
        short = name.removeprefix(AGAINST_TEACHER)
        unit = next((unit for metric, unit in _UNITS.items() if metric in short), "")
        digits = 2 if unit else 4
        estimates = measured.estimates[name]
        gap = measured.differences[name][0, len(estimates) - 1].estimate
        ends = ""
        if gap.low is not None and gap.high is not None:
            ends = f" ({gap.low:+.{digits}f} to {gap.high:+.{digits}f})"
        cells = (f"{estimate.mean:.{digits}f}" for estimate in estimates)
        rows.append((f"{short}{unit}", *cells, f"{gap.mean:+.{digits}f}{ends}"))
    return rows


def _fractions(of_cells: reconstructions.Evaluation) -> dict[str, float]:
    """Returns the fraction of the teacher's SSIM and PSNR that the student alone reaches."""
    means = {
        name: [estimate.mean for estimate in of_cells.estimates[name]] for name in ("ssim", "psnr")
    }
    return {name: values[STUDENT] / values[TEACHER] for name, values in means.items()}


def _kept(of_cells: reconstructions.Evaluation) -> str:
    ratios = []
    for name, fraction in _fractions(of_cells).items():
        digits, unit = (2, " dB") if name == "psnr" else (4, "")
        of_teacher, of_student = (
            f"{of_cells.estimates[name][cell].mean:.{digits}f}" for cell in (TEACHER, STUDENT)
        )
        ratio = f"{fraction:.1%} of the teacher's {name.upper()}"
        ratios.append(f"{ratio} ({of_student} of {of_teacher}{unit})")
    return f"The student keeps {' and '.join(ratios)}."


def _content(measured: reconstructions.Evaluation) -> dict[str, Any]:
    return {
        name: {
            "estimates": [dataclasses.asdict(estimate) for estimate in estimates],
            "student - teacher": dataclasses.asdict(
                measured.differences[name][0, len(estimates) - 1].estimate
            ),
        }
        for name, estimates in measured.estimates.items()
    }


def _of_channels(latents: distillation.Latents) -> list[str]:
    lines = []
    for name, values in latents._asdict().items():
        ideal = 0.0 if name == "offset" else 1.0
        worst = np.argsort(-np.abs(values - ideal))[:_LISTED]
        listed = ", ".join(f"{values[channel]:.3f} in channel {channel}" for channel in worst)
        lines.append(
            f"{name} of the student's latents against the teacher's: {values.min():.3f} to "
            f"{values.max():.3f} in {len(values)} channels; farthest from {ideal:g}: {listed}"
        )
    return lines
