"""``jaxtrain encode``, ``decode`` and ``reconstruct``, and what video commands share."""

import collections
import functools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import numpy as np

from jaxtrain import terminal
from jaxtrain.cli import command_line, commands, job_flags
from jaxtrain.data.video import files
from jaxtrain.errors import InputError
from jaxtrain.formats import counted
from jaxtrain.inference.video import latent_files, writing
from jaxtrain.inference.video.reading import Frame, Video
from jaxtrain.inference.video.writing import Writer
from jaxtrain.jobs import engines, resumable
from jaxtrain.storage import atomic
from jaxtrain.telemetry import images

if TYPE_CHECKING:  # they import jax, which takes seconds: flags and input are checked before
    from jaxtrain.inference.video import folder as video_folder
    from jaxtrain.inference.video.autoencoder import Autoencoder


def main(flags: commands.Encode | commands.Decode | commands.Reconstruct) -> int:
    """Runs the command."""
    match flags:
        case commands.Encode():
            return encode(flags)
        case commands.Decode():
            return decode(flags)
    return reconstruct(flags)


def check_present(path: Path, things: str) -> None:
    """Checks that the input exists."""
    if not path.exists():
        raise InputError(f"IN {path}: no such file or folder; pass {things}")


def autoencoder(
    flags: commands.Encode | commands.Decode | commands.Reconstruct, command: str
) -> "Autoencoder":
    """Loads the model. Imports jax, which takes seconds, so IN and OUT are checked before."""
    from jaxtrain.inference.video.autoencoder import Autoencoder
    from jaxtrain.interop import hub

    return Autoencoder(hub.local(flags.source), flags.precision, command=command)


class Counter:
    """Counts frames or clips, and prints the progress every 30 seconds."""

    def __init__(self, expected: int, unit: str = "frame") -> None:
        self._expected, self._done, self._unit = expected, 0, unit
        self._began = self._printed = time.monotonic()
        self._first_s = 0.0

    def add_one(self) -> None:
        """Counts one more."""
        now = time.monotonic()
        self._done += 1
        if self._done == 1:
            self._first_s = now - self._began
        if now - self._printed >= terminal.SAY_EVERY_S:
            self._printed = now
            terminal.out(f"{self._done:,} of {self._expected:,} {self._unit}s, {self._rate(now)}")

    def line(self) -> str:
        """Returns "30 frames (12.0 frames/s after a start of 3.1 s)", or "1 frame (3.1 s)"."""
        return f"{counted(self._done, self._unit)} ({self._rate(time.monotonic())})"

    def _rate(self, now: float) -> str:
        """The rate after the first one, which waits for the compiler."""
        busy_s = now - self._began - self._first_s
        if self._done < 2 or busy_s <= 0:
            return f"{self._first_s:.1f} s"
        rate = (self._done - 1) / busy_s
        return f"{rate:.1f} {self._unit}s/s after a start of {self._first_s:.1f} s"


def check_is_folder(flags: commands.Folder, source: Path) -> None:
    """Checks that flags for a folder are only given for a folder."""
    cluster = None if flags.engine == "local" else flags.engine
    for name, value in (("workers", flags.workers), ("engine", cluster), ("part", flags.part)):
        if value is not None:
            raise InputError(f"--{name} {value} is for folders, and {source} is not one: omit it")
    job_flags.cluster(flags)  # refuses Ray's other flags


def process_folder(
    model: "Autoencoder",
    todo: list[resumable.Item],
    flags: commands.Encode | commands.Decode,
    settings: dict[str, Any],
    work: "video_folder.Work",
    doing: str,
    cluster: engines.Ray | None,
) -> int:
    """Processes the files of a folder, and prints how many; returns 1 if some failed.

    Args:
        settings: all that a result depends on.

    Raises:
        InputError: OUT has results with other settings.
    """
    from jaxtrain.inference.video import folder as video_folder

    out = flags.target
    with command_line.resumable("files"):
        engine, begin, place = video_folder.workers_of(model, work, flags.workers, cluster)
        outcome = resumable.run(
            todo,
            begin,
            out,
            settings,
            engine=engine,
            say=terminal.out,
            part=job_flags.part(flags),
            doing=doing,
        )
    counts = [
        f"{outcome.made} {doing.removesuffix('ing')}ed"
        if outcome.made or not outcome.skipped
        else "",
        f"{outcome.skipped} already done" if outcome.skipped else "",
        f"{len(outcome.failed)} failed" if outcome.failed else "",
    ]
    number = outcome.made + outcome.skipped + len(outcome.failed)
    terminal.out(
        f"{', '.join(filter(None, counts))} of {number} files on {place}; "
        f"results and reasons: {out / resumable.REPORT}"
    )
    return outcome.exit_code


def encode(flags: commands.Encode) -> int:
    """Runs the command."""
    scale, shift = _numbers("--scale", flags.scale), _numbers("--shift", flags.shift)
    if not np.asarray(scale, np.float32).all():
        raise InputError(f"--scale {flags.scale}: use numbers other than 0, also in float32")
    storage = latent_files.Storage(flags.dtype, flags.layout, scale, shift)
    check_present(flags.video, "a video, or a folder of videos")
    if flags.video.is_dir():
        return _encode_folder(flags, storage)
    check_is_folder(flags, flags.video)
    if flags.target.suffix != storage.suffix:
        raise InputError(
            f"{flags.target} does not end with {storage.suffix}: latents are written in this format"
        )
    atomic.check_writable("OUT", flags.target)
    video = Video(flags.video)
    model = autoencoder(flags, "encode")
    counter = Counter(video.frames)
    with command_line.cleaning_up():
        encoded = latent_files.encode(model, video, flags.target, storage, counter.add_one)
    if note := _note(video, encoded):
        terminal.out(note)
    shape = "x".join(map(str, encoded.shape))
    terminal.out(f"{counter.line()} to latents {shape} in {flags.target}")
    return 0


def _note(video: Video, encoded: latent_files.Encoded) -> str:
    if encoded.off_s <= 0.5 / video.rate:
        return ""
    return (
        f"{video.path} has a variable frame rate: only the average of {float(video.rate):.5g} "
        "frames per second is kept, so jaxtrain decode shifts frames by up to "
        f"{encoded.off_s:.2g} s"
    )


def _encode_folder(flags: commands.Encode, storage: latent_files.Storage) -> int:
    from jaxtrain.inference.video import folder as video_folder

    cluster = job_flags.cluster(flags)
    todo = video_folder.items(
        flags.video, flags.target, files.SUFFIXES, storage.suffix, terminal.out
    )
    model = autoencoder(flags, "encode")
    storage.check(model.model.latent_channels)
    settings = {
        "weights": model.digest(),
        "precision": flags.precision,
        "dtype": storage.dtype,
        "layout": storage.layout,
        "scale": list(storage.scale),
        "shift": list(storage.shift),
    }
    work = functools.partial(_encode_file, storage)
    return process_folder(model, todo, flags, settings, work, "encoding", cluster)


def _encode_file(
    storage: latent_files.Storage,
    model: "Autoencoder",
    source: Path,
    target: Path,
    check: Callable[[], None],
) -> dict[str, Any]:
    video = Video(source)
    encoded = latent_files.encode(model, video, target, storage, check)
    about = {"frames": encoded.frames, "shape": list(encoded.shape), "off_s": encoded.off_s}
    note = _note(video, encoded)
    return about | ({"notes": [note]} if note else {})


def _numbers(flag: str, text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(map(float, text.split(",")))
    except ValueError:
        numbers = (math.nan,)
    with np.errstate(over="ignore"):
        stored = np.asarray(numbers, np.float32)
    if not np.isfinite(stored).all():
        raise InputError(f"{flag} {text}: use numbers such as 0.5 or 0.5,0.25")
    return numbers


_LATENTS = frozenset((".safetensors", ".latent"))


def decode(flags: commands.Decode) -> int:
    """Runs the command."""
    check_present(flags.latents, "latents from jaxtrain encode, or a folder of them")
    if flags.latents.is_dir():
        return _decode_folder(flags)
    check_is_folder(flags, flags.latents)
    writing.check_path(flags.target)
    latents = latent_files.LatentFile(flags.latents)
    model = autoencoder(flags, "decode")
    progress = Counter(latents.frames)
    with command_line.cleaning_up():
        decoded = latent_files.decode(model, latents, flags.target, flags.crf, progress.add_one)
    if decoded.padded_from:
        terminal.out(
            f"padded {decoded.padded_from} to {decoded.size} by repeating the edges: "
            "H.264 requires even sizes"
        )
    terminal.out(f"wrote {progress.line()} of {decoded.size} to {flags.target}")
    return 0


def _decode_folder(flags: commands.Decode) -> int:
    from jaxtrain.inference.video import folder as video_folder

    cluster = job_flags.cluster(flags)
    todo = video_folder.items(flags.latents, flags.target, _LATENTS, ".mp4", terminal.out)
    model = autoencoder(flags, "decode")
    settings = {"weights": model.digest(), "precision": flags.precision, "crf": flags.crf}
    work = functools.partial(_decode_file, flags.crf)
    return process_folder(model, todo, flags, settings, work, "decoding", cluster)


def _decode_file(
    crf: int, model: "Autoencoder", source: Path, target: Path, check: Callable[[], None]
) -> dict[str, Any]:
    decoded = latent_files.decode(model, latent_files.LatentFile(source), target, crf, check)
    return {"frames": decoded.frames, "size": decoded.size}


def reconstruct(flags: commands.Reconstruct) -> int:
    """Runs the command."""
    check_present(flags.video, "a video")
    writing.check_path(flags.target)
    if flags.target.exists() and flags.target.samefile(flags.video):
        raise InputError(f"output {flags.target} is the same file as the input: choose another one")
    video = Video(flags.video)
    model = autoencoder(flags, "reconstruct")
    with command_line.cleaning_up():
        _reconstruct(model, video, flags.target, flags)
    return 0


def _reconstruct(
    model: "Autoencoder", video: Video, target: Path, flags: commands.Reconstruct
) -> None:
    from jaxtrain.inference.video import autoencoder as autoencoding

    # Only this rule depends on the number of latents.
    exact = model.model.timing.trim == "odd_latents"
    latents = model.model.timing.needed(video.count()) if exact else None
    originals: collections.deque[Frame] = collections.deque()
    sound = None if flags.no_audio else video
    counter = Counter(video.frames)
    with writing.writing(
        target,
        rate=video.rate,
        time_base=video.time_base,
        pixel_aspect=video.pixel_aspect,
        crf=flags.crf,
        sound_of=sound,
    ) as writer:
        images = _images(video, originals, writer, sound=sound is not None)
        height, width = video.height, video.width
        beside = _side_by_side(width)
        decoded = model.decoded(model.encoded(images), height=height, width=width, count=latents)
        for pixels in decoded:
            if not originals:
                break  # the last latent may decode to more frames than were encoded
            original = originals.popleft()
            image = beside(original.pixels, pixels) if flags.side_by_side else pixels
            padding = autoencoding.even(*image.shape[:2])
            writer.add(Frame(padding(image), original.pts))
            counter.add_one()
    out_height, out_width = image.shape[0] + padding.bottom, image.shape[1] + padding.right
    if padding != autoencoding.Padding(0, 0):
        terminal.out(
            f"padded {image.shape[1]}x{image.shape[0]} to {out_width}x{out_height} by repeating "
            "the edges: H.264 requires even sizes"
        )
    terminal.out(f"wrote {counter.line()} of {out_width}x{out_height} to {target}")


def _images(
    video: Video, originals: collections.deque[Frame], writer: Writer, *, sound: bool
) -> Iterator[np.ndarray]:
    """Yields the pixels of each frame; queues the frames, and copies the audio to the writer."""
    for item in video.items(sound=sound):
        if isinstance(item, av.Packet):
            writer.copy(item)
        else:
            originals.append(item)
            yield item.pixels


def _side_by_side(width: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Returns what puts an original beside its reconstruction, with labels above them."""
    labels = images.heading(2 * width, ("original", "reconstruction"))

    def beside(original: np.ndarray, reconstruction: np.ndarray) -> np.ndarray:
        return np.concatenate([labels, np.concatenate([original, reconstruction], axis=1)])

    return beside
