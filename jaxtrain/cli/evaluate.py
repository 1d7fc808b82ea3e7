"""``jaxtrain evaluate``: measures the quality of models."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxtrain import formats, terminal, versions
from jaxtrain.cli import command_line, commands, video
from jaxtrain.config import field_values, record
from jaxtrain.data.video import files
from jaxtrain.errors import InputError
from jaxtrain.inference.evaluation import evaluation_clips
from jaxtrain.inference.evaluation.intervals import Difference, Estimate
from jaxtrain.inference.evaluation.protocols import PROTOCOLS, Protocol
from jaxtrain.storage import addresses, atomic
from jaxtrain.telemetry import images

if TYPE_CHECKING:
    from jaxtrain.inference.evaluation.reconstructions import ClipMetrics, Drawn, Evaluation

_MOST_SOURCES = 3
_VIDEO_FLAGS = (
    *("split", "protocol", "frames", "height", "width", "clips", "lpips", "i3d"),
    *("worst", "teacher", "teacher_scaling", "report"),
)
_TEXT_FLAGS = ("text_field", "max_tokens", "max_examples", "rows")
_LETTERS = "ABC"
_USUAL = {"frames": 16, "height": 256, "width": 256}
_DIGITS = {"psnr": 3, "static_flicker": 3}
_USUAL_DIGITS = 4
_UNITS = {"psnr": "psnr (dB)"}

_LONGEST_STEM = 150  # bytes


def main(flags: commands.Evaluate) -> int:
    """Runs the command."""
    if files.is_absent(flags.data):  # whether it fits depends on the model
        raise InputError(
            f"--data {flags.data}: no such file or folder; pass a folder of videos, a video, or a "
            "list of them; for a language model, a text file, or the folder of CORE or BLiMP"
        )
    # They import jax, which takes seconds.
    from jaxtrain.cli import text
    from jaxtrain.inference import load
    from jaxtrain.inference.evaluation import distillation, i3d, language_models, reconstructions
    from jaxtrain.inference.video.autoencoder import Autoencoder
    from jaxtrain.interop import hub, weights

    flags = dataclasses.replace(flags, sources=tuple(map(hub.local, flags.sources)))
    for source in flags.sources:
        weights.check_there(source)
    for source in flags.sources:
        model = weights.model_at(source)
        if model is not None and model.task in language_models.KINDS:
            command_line.refuse(flags, _VIDEO_FLAGS, f"{source} is a language model")
            if len(flags.sources) > 1:
                raise InputError("evaluate: one language model at a time")
            return text.evaluate(flags, source, language_models.KINDS[model.task])
        if model is not None and model.task != "reconstruct":
            tasks = (*language_models.KINDS, "reconstruct")
            raise load.cannot(model, "evaluate", *tasks, source=source)
    command_line.refuse(flags, _TEXT_FLAGS, f"{flags.sources[0]} is not a language model")
    if len(flags.sources) > _MOST_SOURCES:
        raise InputError(
            f"evaluate: {len(flags.sources)} sources given; use at most {_MOST_SOURCES}"
        )
    for name in ("teacher_scaling", "report"):
        if flags.teacher is None and (value := getattr(flags, name)) is not None:
            raise InputError(f"--{name.replace('_', '-')} {value} requires --teacher")
    size, protocol = _resolved(flags)
    atomic.check_writable("--report", flags.report)
    if flags.worst is not None:
        _make_empty(flags.worst)
    pair = None
    if flags.teacher is not None:
        from jaxtrain.cli import evaluate_student

        pair = evaluate_student.load(flags)
        size["frames"] = evaluate_student.frames(pair, flags, size["frames"])
    if protocol is None:
        clips = evaluation_clips.choose(
            flags.data,
            "--data",
            **size,
            clips=flags.clips,
            say=terminal.say,
            only=None if flags.split == "all" else _held_out(flags.sources, flags.data),
        )
    else:
        clips = evaluation_clips.from_the_start(
            flags.data,
            "--data",
            **size,
            fps=protocol.fps,
            complete=protocol.complete,
            say=terminal.say,
        )
    measures = reconstructions.measures(flags.lpips)
    if pair is None:
        meter = reconstructions.Meter(
            [Autoencoder(path, flags.precision, command="evaluate") for path in flags.sources],
            measures,
            **size,
            features=None if flags.i3d is None else i3d.measure(flags.i3d),
        )
    else:
        meter = distillation.StudentMeter(pair.student, pair.teacher, measures, **size)
    counter = video.Counter(len(clips), "clip")
    with command_line.cleaning_up():
        measured = meter.measure(clips, terminal.say, counter.add_one)
    if not measured:
        data = addresses.public(flags.data)
        raise InputError(f"--data {data}: none of the clips can be read; see the messages above")
    about = _about(measured, size | {"compared": meter.compared}, flags.precision)
    if pair is not None:
        student_findings = evaluate_student.findings(meter, measured)
        text_out, content = student_findings.text(about), student_findings.content
    else:
        evaluated, rfvd = reconstructions.evaluation(measured, meter.names), meter.rfvd()
        text_out = _text(evaluated, about, meter.columns, rfvd)
        content = {"metrics": _as_json(evaluated), **({"rfvd": rfvd} if rfvd else {})}
    terminal.out(text_out)
    if protocol is not None:
        terminal.out(_published(protocol))
    if flags.json:
        content = {
            "sources": [model.source for model in meter.models],
            "data": addresses.public(flags.data),
            "compared_frames": meter.compared,
            **size,
            "precision": flags.precision,
            "versions": versions.line(),
            **content,
            **({"protocol": dataclasses.asdict(protocol)} if protocol else {}),
            "clips": [dataclasses.asdict(one) for one in measured],
        }
        atomic.write_json(flags.json, content)
        terminal.out(f"wrote {flags.json}")
    if flags.worst is None and flags.report is None:
        return 0
    worst = _drawn(meter.worst(clips, measured))
    if flags.worst is not None:
        for path in _write(worst, flags.worst):
            terminal.out(f"wrote {path}")
    if flags.report is not None:
        student_findings.write(flags.report, about, worst)
        terminal.out(f"report: {flags.report}")
    return 0


def _make_empty(folder: Path) -> None:
    """Makes the folder of ``--worst``, before the work starts.

    Raises:
        InputError: it has files, such as images of other clips, or cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--worst {folder} is a file: pass a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise InputError(f"--worst {folder}: {error.strerror}: use another folder") from error
    if names:
        raise InputError(
            f"--worst {folder} already has files, such as {names[0]}: use a new or an empty folder"
        )
    atomic.check_writable("--worst", folder / "1.png")


class Image(NamedTuple):
    """An image of a clip."""

    video: str
    title: str
    png: bytes


def _drawn(worst: Sequence["Drawn"]) -> list[Image]:
    titled = [(clip, f"{clip.video}, at {clip.place:.0%}") for clip in worst]
    return [
        Image(clip.video, title, images.encode(clip.image, images.Labels(title, clip.rows)).file)
        for clip, title in titled
    ]


def _write(worst: Sequence[Image], folder: Path) -> list[Path]:
    paths = []
    for number, image in enumerate(worst, start=1):
        # A name of a file has at most 255 bytes, and that of the file in the making is longer.
        stem = Path(image.video).stem.encode(errors="surrogateescape")[:_LONGEST_STEM]
        path = folder / f"{number}-{stem.decode(errors='ignore')}.png"
        atomic.write_whole(path, image.png)
        paths.append(path)
    return paths


def _held_out(sources: Sequence[Path], data: str) -> Collection[str] | None:
    """Returns the videos on which no source was trained; None if none was trained on these.

    Raises:
        InputError: the data have changed since, so that the split of a run is unknown; or no video
            is left, such as of a run that trained on all of them.
    """
    from jaxtrain.data.video import Config
    from jaxtrain.interop import weights
    from jaxtrain.models import from_file

    held_out: set[str] | None = None
    for source in sources:
        meta = weights.run_meta(source)
        trained_on = meta.get("config", {}).get("data", {})
        if not _is_same(trained_on.get("path"), data):
            continue
        if (val_path := trained_on.get("val_path")) is not None:
            raise InputError(
                f"{source} was trained on --data {addresses.public(data)}, and validates on "
                f"other videos: pass --data {val_path}, or --split all to measure those that it "
                "was trained on"
            )
        settings = record.section(Config, trained_on, str(source), "data")
        model = from_file.model_config(meta["config"]["model"], str(source))
        opened = dataclasses.replace(settings, path=data).open(model, seed=0, say=lambda line: None)
        if opened.train.fingerprint != meta["fingerprint"]:
            raise InputError(
                f"{source} was trained on --data {addresses.public(data)}, and these videos have "
                "changed since, so what it was not trained on is unknown: pass --split all to "
                "measure all of them, or other videos"
            )
        videos = opened.val.videos  # type: ignore[attr-defined]
        names = videos.table.names
        validates = {names[number] for number in videos.chosen.tolist()}
        held_out = validates if held_out is None else held_out & validates
        terminal.say(
            f"{source} was trained on --data {addresses.public(data)}: measuring only what it "
            "validates on; --split all measures everything"
        )
    if held_out is not None and not held_out:
        raise InputError(
            f"--data {addresses.public(data)}: each of these videos has trained one of "
            f"{', '.join(map(str, sources))}; pass other videos, or --split all"
        )
    return held_out


def _is_same(trained_on: str | None, data: str) -> bool:
    if trained_on is None or addresses.is_address(trained_on) or addresses.is_address(data):
        return trained_on == addresses.public(data)
    return atomic.expanded(trained_on).resolve() == atomic.expanded(data).resolve()


def _resolved(flags: commands.Evaluate) -> tuple[dict[str, int], Protocol | None]:
    """Returns the size of a clip, and the protocol of ``--protocol``.

    Raises:
        InputError: an unknown protocol, or flags that it determines.
    """
    if flags.protocol is None:
        return {name: getattr(flags, name) or value for name, value in _USUAL.items()}, None
    protocol = PROTOCOLS.get(flags.protocol)
    if protocol is None:
        near = field_values.did_you_mean(flags.protocol, PROTOCOLS)
        raise InputError(f"--protocol {flags.protocol}: unknown protocol; {near}")
    for name in (*_USUAL, "clips"):
        if getattr(flags, name) is not None:
            raise InputError(
                f"--{name} {getattr(flags, name)}: --protocol {flags.protocol} determines it; omit "
                "one of the two"
            )
    return {name: getattr(protocol, name) for name in _USUAL}, protocol


def _about(measured: Sequence["ClipMetrics"], size: Mapping[str, int], precision: str) -> str:
    videos = len({clip.video for clip in measured})
    return (
        f"measured on {formats.counted(videos, 'video')} "
        f"({formats.counted(len(measured), 'clip')} of {size['frames']} frames, "
        f"{size['compared']} of them compared, {size['height']}x{size['width']}, {precision})"
    )


def _text(
    evaluated: "Evaluation", about: str, sources: Sequence[str], rfvd: Sequence[float]
) -> str:
    lines = [
        about,
        *(f"{letter}  {source}" for letter, source in zip(_LETTERS, sources, strict=False)),
        "",
    ]
    rows: list[tuple[str, ...]] = [("", "", "mean", "std", "95% interval", "videos")]
    for name, estimates in evaluated.estimates.items():
        for letter, estimate in zip(_LETTERS, estimates, strict=False):
            rows.append(
                (_UNITS.get(name, name), letter, *_numbers(name, estimate), str(estimate.count))
            )
    for letter, value in zip(_LETTERS, rfvd, strict=False):
        rows.append(("rfvd", letter, f"{value:.2f}", "-", "-", str(evaluated.videos)))
    lines.append(formats.columns(rows, {0, 1}))
    if len(sources) > 1:
        rows = [("", "", "difference", "std", "95% interval", "p (t)", "p (signs)")]
        for name, differences in evaluated.differences.items():
            for (i, j), gap in differences.items():
                pair = f"{_LETTERS[j]} - {_LETTERS[i]}"
                p_values = (_p(gap.p_student), _p(gap.p_signs))
                rows.append(
                    (_UNITS.get(name, name), pair, *_numbers(name, gap.estimate, "+"), *p_values)
                )
        lines += ["", formats.columns(rows, {0, 1})]
    lines += [
        "",
        "std and Student's t interval over videos; the value of a video is the mean of its clips.",
    ]
    if len(sources) > 1:
        lines.append(
            "p: paired t-test and sign-flip test, two-sided, not corrected for multiple tests."
        )
    return "\n".join(lines)


def _published(protocol: Protocol) -> str:
    rows: list[tuple[str, ...]] = [
        ("model", "", "psnr (dB)", "ssim", f"lpips/{protocol.lpips}", "rfvd")
    ]
    for entry in protocol.published:
        values = (f"{entry.psnr:.2f}", entry.ssim, entry.lpips, entry.rfvd)
        rows.append((entry.model, "", *("-" if value is None else str(value) for value in values)))
    return (
        f"\npublished, on {protocol.about}:\n{formats.columns(rows, {0, 1})}\n"
        f"source: {protocol.source}\n"
        "These were computed by other programs, which may crop, average, and compute SSIM and rFVD "
        "slightly differently."
    )


def _numbers(name: str, estimate: Estimate, sign: str = "") -> tuple[str, str, str]:
    digits = f".{_DIGITS.get(name, _USUAL_DIGITS)}f"
    if estimate.std is None or estimate.low is None or estimate.high is None:
        return f"{estimate.mean:{sign}{digits}}", "-", "-"
    interval = f"{estimate.low:{sign}{digits}} to {estimate.high:{sign}{digits}}"
    return f"{estimate.mean:{sign}{digits}}", f"{estimate.std:{digits}}", interval


def _p(value: float | None) -> str:
    if value is None:
        return "-"
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"


def _as_json(evaluated: "Evaluation") -> dict[str, Any]:
    def of_gap(gap: Difference) -> dict[str, Any]:
        fields = dataclasses.asdict(gap)
        return {**fields.pop("estimate"), **fields}

    return {
        name: {
            "estimates": [dataclasses.asdict(estimate) for estimate in estimates],
            "differences": {
                f"{_LETTERS[j]} - {_LETTERS[i]}": of_gap(gap)
                for (i, j), gap in evaluated.differences[name].items()
            },
        }
        for name, estimates in evaluated.estimates.items()
    }
