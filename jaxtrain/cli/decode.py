"""``jaxtrain decode``: turns latents into videos."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain import terminal
from jaxtrain.cli import command_line, commands, job_flags, video_flags
from jaxtrain.data.video import writing
from jaxtrain.inference import latent_files

if TYPE_CHECKING:
    from jaxtrain.inference.video import Autoencoder

_SUFFIXES = frozenset((".safetensors", ".latent"))


def main(flags: commands.Decode) -> int:
    """Runs the command.

    Raises:
        InputError: wrong use, or a file that cannot be read or written.
    """
    video_flags.check_present(flags.latents, "latents from jaxtrain encode, or a folder of them")
    if flags.latents.is_dir():
        return _folder(flags)
    video_flags.check_is_folder(flags, flags.latents)
    writing.check_path(flags.target)
    latents = latent_files.LatentFile(flags.latents)
    model = video_flags.autoencoder(flags, "decode")
    progress = video_flags.Counter(latents.frames)
    with command_line.cleaning_up():
        found = latent_files.decode(model, latents, flags.target, flags.crf, progress.one)
    if found.padded_from:
        terminal.out(
            f"padded {found.padded_from} to {found.size} by repeating the edges: "
            "H.264 requires even sizes"
        )
    terminal.out(f"wrote {progress.line()} of {found.size} to {flags.target}")
    return 0


def _folder(flags: commands.Decode) -> int:
    from jaxtrain.inference import video_folder

    cluster = job_flags.cluster(flags)
    todo = video_folder.items(flags.latents, flags.target, _SUFFIXES, ".mp4", terminal.out)
    model = video_flags.autoencoder(flags, "decode")
    settings = {
        "weights": model.digest(),
        "precision": flags.precision,
        "crf": flags.crf,
    }
    work = functools.partial(_decode_file, flags.crf)
    return video_flags.process_folder(model, todo, flags, settings, work, "decoding", cluster)


def _decode_file(
    crf: int, model: "Autoencoder", source: Path, target: Path, check: Callable[[], None]
) -> dict[str, Any]:
    found = latent_files.decode(model, latent_files.LatentFile(source), target, crf, check)
    return {"frames": found.frames, "size": found.size}
