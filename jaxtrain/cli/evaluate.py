"""Measures the quality of one to three video autoencoders, or of a language model.

SOURCE is a checkpoint, a run directory, a weights file, s3://BUCKET/PATH, or
hf:ORG/MODEL on the Hub. Autoencoders reconstruct the same clips, the middle of
each video, and each frame is compared with its original. --protocol measures as
published, and prints the published results beside it. To measure a language
model on a text, run jaxtrain evaluate SOURCE --data FILE.txt [--max-tokens N],
which prints the pseudo-perplexity or the bits per byte. For the flags of a language
model, run jaxtrain evaluate SOURCE --help.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain import terminal, versions
from jaxtrain.cli import command_line, job_flags, video_flags
from jaxtrain.config import field_values
from jaxtrain.data.video import evaluation_clips, files
from jaxtrain.errors import InputError
from jaxtrain.inference.intervals import Difference, Estimate
from jaxtrain.inference.protocols import PROTOCOLS, Protocol
from jaxtrain.storage import addresses, atomic

if TYPE_CHECKING:
    from jaxtrain.data.video.index import Entry
    from jaxtrain.inference.compare import Comparison

_MOST_SOURCES = 3
_LETTERS = "ABC"
_USUAL = {"frames": 16, "height": 256, "width": 256}
_DIGITS = {"psnr": 3}
_USUAL_DIGITS = 4
_UNITS = {"psnr": "psnr (dB)"}


def main(arguments: list[str]) -> int:
    """Runs the command.

    Raises:
        InputError: wrong use, or nothing can be measured.
    """
    _check_present(arguments)
    for value in command_line.values_of("--config", arguments):  # before SOURCE is looked at
        command_line.own_config(value)
    # They import jax, which takes seconds.
    from jaxtrain.cli import evaluate_text
    from jaxtrain.inference import compare, load
    from jaxtrain.interop import hub, weights

    arguments = [
        str(hub.local(text)) if hub.is_remote(text) and before != "--data" else text
        for before, text in zip(["", *arguments], arguments, strict=False)
    ]
    for path in _sources(arguments):
        weights.check_there(path)
    for source, model in _models(arguments):
        if model.task in evaluate_text.KINDS:
            return evaluate_text.main(arguments, evaluate_text.KINDS[model.task])
        if model.task != "reconstruct":
            tasks = (*evaluate_text.KINDS, "reconstruct")
            raise load.cannot(model, "evaluate", *tasks, source=source)
    flags = command_line.parse_all(_parser(), arguments)
    if flags is None:
        return 0
    _check(flags)
    protocol = _resolve(flags)
    cluster = job_flags.cluster(flags)
    atomic.check_writable("--json", flags.json)
    size = {"frames": flags.frames, "height": flags.height, "width": flags.width}
    if protocol is None:
        clips = evaluation_clips.choose(
            flags.data,
            "--data",
            **size,
            clips=flags.clips,
            say=terminal.say,
            entries=None if flags.split == "all" else _held_out(flags.sources, flags.data),
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
    config = compare.MeterConfig(
        precision=flags.precision,
        **size,
        lpips=flags.lpips,
        backbone=flags.backbone,
        i3d=flags.i3d,
    )
    meter = config.build(flags.sources)
    counter = video_flags.Counter(len(clips), "clip")
    with command_line.cleaning_up():
        measured = meter.measure(
            clips, terminal.say, counter.one, None if cluster is None else (cluster, config)
        )
    if not measured:
        data = addresses.public(flags.data)
        raise InputError(f"--data {data}: none of the clips can be read; see the messages above")
    found = compare.compare(measured, meter.names)
    rfvd = meter.rfvd()
    terminal.out(
        _text(found, [model.source for model in meter.models], flags, meter.compared, rfvd)
    )
    if protocol is not None:
        terminal.out(_published(protocol))
    if flags.json:
        content = {
            "sources": [model.source for model in meter.models],
            "data": addresses.public(flags.data),
            "frames": flags.frames,
            "compared_frames": meter.compared,
            "height": flags.height,
            "width": flags.width,
            "precision": flags.precision,
            "versions": versions.line(),
            "metrics": _as_json(found),
            **({"rfvd": rfvd} if rfvd else {}),
            **({"protocol": dataclasses.asdict(protocol)} if protocol else {}),
            "clips": [dataclasses.asdict(one) for one in measured],
        }
        atomic.write_whole(flags.json, json.dumps(content, indent=2) + "\n")
        terminal.out(f"wrote {flags.json}")
    return 0


def _check_present(arguments: list[str]) -> None:
    """Refuses ``--data`` that does not exist; whether it fits depends on the model."""
    for value in command_line.values_of("--data", arguments):
        if files.is_absent(value):
            raise InputError(
                f"--data {value}: no such file or folder; pass a folder of videos, a video, or a "
                "list of them; for a language model, a text file"
            )


def _sources(arguments: list[str]) -> list[Path]:
    """Returns the arguments that are not flags, nor follow one."""
    before = ["", *arguments]
    return [
        command_line.named_file(text)
        for flag, text in zip(before, arguments, strict=False)
        if not text.startswith("-") and not (flag.startswith("-") and "=" not in flag)
    ]


def _models(arguments: list[str]) -> Iterator[tuple[Path, Any]]:
    """The models among the arguments."""
    from jaxtrain.interop import weights

    paths = [command_line.named_file(text) for text in arguments if not text.startswith("-")]
    for path in paths:
        model = weights.model_at(path)
        if model is not None:
            yield path, model


def _held_out(sources: Sequence[Path], data: str) -> Sequence["Entry"] | None:
    """Returns the videos on which no source was trained; None if none was trained on this data.

    Raises:
        InputError: the data have changed since, so that the split of a run is unknown.
    """
    from jaxtrain.data.video import Config
    from jaxtrain.interop import weights
    from jaxtrain.models import from_file

    held_out: dict[str, Entry] | None = None
    for source in sources:
        meta = weights.run_meta(source)
        trained_on = meta.get("config", {}).get("data", {})
        if not _is_same(trained_on.get("path"), data):
            continue
        settings = from_file.section(Config, trained_on, str(source), "data")
        model = from_file.model_config(meta["config"]["model"], str(source))
        opened = dataclasses.replace(settings, path=data).open(model, seed=0, say=lambda line: None)
        if opened.train.fingerprint != meta["fingerprint"]:
            raise InputError(
                f"{source} was trained on --data {addresses.public(data)}, and these videos have "
                "changed since, so what it was not trained on is unknown: pass --split all to "
                "measure all of them, or other videos"
            )
        validates = {entry.path: entry for entry in opened.val.entries}  # type: ignore[attr-defined]
        terminal.say(
            f"{source} was trained on --data {addresses.public(data)}: measuring only what it "
            "validates on; --split all measures everything"
        )
        held_out = {
            path: entry for path, entry in validates.items() if held_out is None or path in held_out
        }
    return None if held_out is None else list(held_out.values())


def _is_same(trained_on: str | None, data: str) -> bool:
    """Returns whether a recorded path or URL is that of ``--data``."""
    if trained_on is None or addresses.is_address(trained_on) or addresses.is_address(data):
        return trained_on == addresses.public(data)
    return atomic.expanded(trained_on).resolve() == atomic.expanded(data).resolve()


def _check(flags: argparse.Namespace) -> None:
    if len(flags.sources) > _MOST_SOURCES:
        raise InputError(
            f"evaluate: {len(flags.sources)} sources given; use at most {_MOST_SOURCES}"
        )
    for name in ("frames", "height", "width", "clips"):
        value = getattr(flags, name)
        if value is not None and value < 1:
            raise InputError(f"--{name} {value}: use at least 1")


def _resolve(flags: argparse.Namespace) -> Protocol | None:
    """Sets the size of a clip; returns the protocol of ``--protocol``.

    Raises:
        InputError: an unknown protocol, or flags that it determines.
    """
    if flags.protocol is None:
        for name, value in _USUAL.items():
            setattr(flags, name, getattr(flags, name) or value)
        return None
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
    for name in _USUAL:
        setattr(flags, name, getattr(protocol, name))
    return protocol


def _text(
    found: "Comparison",
    sources: Sequence[str],
    flags: argparse.Namespace,
    compared: int,
    rfvd: Sequence[float],
) -> str:
    lines = [
        f"measured on {found.videos} {'video' if found.videos == 1 else 'videos'} "
        f"({found.clips} {'clip' if found.clips == 1 else 'clips'} of {flags.frames} frames, "
        f"{compared} of them compared, {flags.height}x{flags.width}, {flags.precision})",
        *(f"{letter}  {source}" for letter, source in zip(_LETTERS, sources, strict=False)),
        "",
    ]
    rows: list[tuple[str, ...]] = [("", "", "mean", "std", "95% interval", "videos")]
    for name, estimates in found.estimates.items():
        for letter, one in zip(_LETTERS, estimates, strict=False):
            rows.append((_UNITS.get(name, name), letter, *_numbers(name, one), str(one.count)))
    for letter, value in zip(_LETTERS, rfvd, strict=False):
        rows.append(("rfvd", letter, f"{value:.2f}", "-", "-", str(found.videos)))
    lines.append(_table(rows))
    if len(sources) > 1:
        rows = [("", "", "difference", "std", "95% interval", "p (t)", "p (signs)")]
        for name, differences in found.differences.items():
            for (i, j), gap in differences.items():
                pair = f"{_LETTERS[j]} - {_LETTERS[i]}"
                p_values = (_p(gap.p_student), _p(gap.p_signs))
                rows.append(
                    (_UNITS.get(name, name), pair, *_numbers(name, gap.estimate, "+"), *p_values)
                )
        lines += ["", _table(rows)]
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
    """Returns the table of published results."""
    rows: list[tuple[str, ...]] = [
        ("model", "", "psnr (dB)", "ssim", f"lpips/{protocol.lpips}", "rfvd")
    ]
    for one in protocol.published:
        values = (f"{one.psnr:.2f}", one.ssim, one.lpips, one.rfvd)
        rows.append((one.model, "", *("-" if value is None else str(value) for value in values)))
    return (
        f"\npublished, on {protocol.about}:\n{_table(rows)}\nsource: {protocol.source}\n"
        "These were computed by other programs, which may crop, average, and compute SSIM and rFVD "
        "slightly differently."
    )


def _numbers(name: str, one: Estimate, sign: str = "") -> tuple[str, str, str]:
    digits = f".{_DIGITS.get(name, _USUAL_DIGITS)}f"
    if one.std is None or one.low is None or one.high is None:
        return f"{one.mean:{sign}{digits}}", "-", "-"
    interval = f"{one.low:{sign}{digits}} to {one.high:{sign}{digits}}"
    return f"{one.mean:{sign}{digits}}", f"{one.std:{digits}}", interval


def _p(value: float | None) -> str:
    if value is None:
        return "-"
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            f"{cell:{width}}" if column < 2 else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _as_json(found: "Comparison") -> dict[str, Any]:
    def of_gap(gap: Difference) -> dict[str, Any]:
        whole = dataclasses.asdict(gap)
        return {**whole.pop("estimate"), **whole}

    return {
        name: {
            "estimates": [dataclasses.asdict(one) for one in estimates],
            "differences": {
                f"{_LETTERS[j]} - {_LETTERS[i]}": of_gap(gap)
                for (i, j), gap in found.differences[name].items()
            },
        }
        for name, estimates in found.estimates.items()
    }


def _parser() -> argparse.ArgumentParser:
    usage = "jaxtrain evaluate SOURCE [SOURCE [SOURCE]] --data PATH [flags]"
    parser = command_line.bare_parser("evaluate", usage, __doc__)
    add = parser.add_argument
    add(
        "sources",
        metavar="SOURCE",
        nargs="+",
        type=command_line.named_file,
        help="an autoencoder; differences between two or three are tested for significance",
    )
    add("--data", metavar="PATH", required=True, help="the videos: a folder, a video, or a list")
    add(
        "--split",
        choices=("val", "all"),
        default="val",
        help="val: of data that a SOURCE was trained on, only the part for validation; all: all "
        "videos, as always with --protocol (default: val)",
    )
    add(
        "--protocol",
        metavar="NAME",
        help=f"measure as published: {' or '.join(PROTOCOLS)}; it determines the clips",
    )
    add("--frames", metavar="N", type=int, help="frames per clip (default: 16)")
    add("--height", metavar="N", type=int, help="clip height, pixels (default: 256)")
    add("--width", metavar="N", type=int, help="clip width, pixels (default: 256)")
    add(
        "--clips",
        metavar="N",
        type=int,
        help="total number of clips, spread evenly over the videos (default: one per video)",
    )
    add(
        "--lpips",
        metavar="FILE",
        type=command_line.named_file,
        help="also measure LPIPS, with this state dict of lpips.LPIPS, by AlexNet (net='alex') or "
        "VGG16 (net='vgg'), or of its linear layers",
    )
    add(
        "--backbone",
        metavar="FILE",
        type=command_line.named_file,
        help="state dict of torchvision's network, if --lpips has only the linear layers",
    )
    add(
        "--i3d",
        metavar="FILE",
        type=command_line.named_file,
        help="also measure rFVD, the Fréchet video distance to the originals, with this state dict "
        "of pytorch-i3d's InceptionI3d(400)",
    )
    add(
        "--json",
        metavar="FILE",
        type=command_line.named_file,
        help="also write the results, with the values of each clip, to FILE as JSON",
    )
    job_flags.add_for_models(parser, parts=False)
    command_line.add_precision(parser)
    command_line.add_config(parser)
    return parser
