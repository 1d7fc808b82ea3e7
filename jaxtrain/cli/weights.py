"""``jaxtrain export`` and ``jaxtrain import``: weights out and in."""

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain import terminal, versions
from jaxtrain.cli import commands
from jaxtrain.config import invocation
from jaxtrain.data.text import tokenizer
from jaxtrain.errors import InputError
from jaxtrain.inference import export_check, load
from jaxtrain.interop import hub, huggingface, model_card, weights
from jaxtrain.models import from_file, video_ae
from jaxtrain.models.reconstruction import timing
from jaxtrain.storage import atomic, tensor_files
from jaxtrain.training import state_size


def main(flags: commands.Export | commands.Import) -> int:
    """Runs the command."""
    return export_to(flags) if isinstance(flags, commands.Export) else import_from(flags)


def export_to(flags: commands.Export) -> int:
    """Runs the command."""
    _check(flags)
    source = hub.local(flags.source)
    if flags.target is not None:
        terminal.out(f"wrote {_write(flags, source, flags.target)[0]}")
        return 0
    assert flags.push is not None, "_check() requires one of the two"
    with tempfile.TemporaryDirectory(prefix="jaxtrain-push-") as scratch:
        _, name = _write(flags, source, Path(scratch))
        page = hub.push(
            Path(scratch),
            flags.push,
            private=flags.private,
            message=f"Upload {name} with jaxtrain {versions.versions()['jaxtrain']}",
            say=terminal.warn,
        )
    terminal.out(f"pushed to {page}")
    return 0


def _check(flags: commands.Export) -> None:
    if flags.push is not None:
        if flags.target is not None:
            raise InputError(f"--push {flags.push} writes no files: drop {flags.target}")
        if flags.format == "comfyui":
            raise InputError(f"--push {flags.push} has no --format comfyui: drop one of the two")
        hub.check_login(flags.push)
        return
    if flags.target is None:
        raise InputError("missing OUT: pass a file or folder to write, or --push ORG/MODEL")
    if flags.private:
        raise InputError("--private is for --push: drop it")
    if flags.license and flags.format != "hf":
        raise InputError("--license is for a model card: add --format hf or --push, or drop it")
    if flags.format == "hf":
        huggingface.check_target(flags.target)
        return
    if flags.format == "comfyui":
        if flags.target.is_dir():
            return
        if flags.target.suffix != tensor_files.SAFETENSORS:
            raise InputError(
                f"OUT {flags.target} is not a folder that exists: create it, or end the name with "
                f"{tensor_files.SAFETENSORS}, which --format comfyui writes"
            )
    tensor_files.check_ending(flags.target)
    atomic.check_writable("OUT", flags.target)
    if flags.target.suffix != tensor_files.SAFETENSORS:
        tensor_files.pytorch(flags.target)


def _can_write(model: Any, *, folder: bool) -> bool:
    return bool(model.has_folder if folder else model.has_weights)


def _other_form(model: Any, name: str, *, folder: bool) -> str:
    if not _can_write(model, folder=not folder):
        return f"a model {name} cannot be exported"
    if not folder:
        return f"a model {name} has no weights file: write a folder with --format hf"
    comfyui = ", or write --format comfyui" if model.task == "reconstruct" else ""
    return (
        f"transformers and diffusers have no network like this {name}, so there is no folder for "
        f"them: omit --format hf, for a weights file{comfyui}"
    )


def _write(flags: commands.Export, source: Path, target: Path) -> tuple[Path, str]:
    """Returns the path that was written, and the model's name."""
    loaded = weights.load(source)
    name = from_file.name_of(loaded.model)
    folder = flags.format == "hf"
    if flags.push is not None and flags.format is None:
        folder = loaded.model.has_folder
    if flags.push is not None and not folder and loaded.model.task in ("generate", "fill"):
        if loaded.model.has_folder:
            raise InputError(
                f"--format {flags.format}: --push uploads a language model as a folder for "
                "transformers; omit --format"
            )
        raise InputError(
            f"{loaded.source}: --push uploads a language model as a folder for transformers, which "
            f"has no such model as this {name}: export a weights file instead, without --push"
        )
    if not _can_write(loaded.model, folder=folder):
        raise InputError(f"{loaded.source}: {_other_form(loaded.model, name, folder=folder)}")
    if flags.format == "comfyui":
        usual = loaded.model.comfyui_name()
        if target.is_dir():
            target = target / f"{usual}{tensor_files.SAFETENSORS}"
            atomic.check_writable("OUT", target)
        if note := loaded.model.comfyui_note():
            terminal.warn(f"warning: {note}")
        loaded = dataclasses.replace(loaded, params=weights.in_float16(loaded))
    elif not folder and (note := loaded.model.export_note()):
        terminal.warn(f"warning: {note}")
    if folder and loaded.model.diffusers_class:
        count = huggingface.write_diffusers(target, loaded.model, loaded.params)
    elif folder:
        tokenizer.check_travels(source)
        path = tokenizer.beside(Path(loaded.source))
        loaded_tokenizer = tokenizer.of_source(path)
        count = huggingface.write(target, loaded.model, loaded.params, loaded_tokenizer, path)
    elif flags.push is not None:
        count = weights.save(target / huggingface.ARRAYS, loaded.model, loaded.params)
    else:
        half = flags.format == "comfyui"
        count = weights.save(target, loaded.model, loaded.params, float16=half)
    checks = export_check.check(
        target if folder or flags.push is None else target / huggingface.ARRAYS,
        loaded.model,
        loaded.params,
    )
    if folder or flags.push is not None:
        written = model_card.write(
            target,
            loaded.model,
            Path(loaded.source),
            repository=flags.push,
            license_name=flags.license,
            parameters=count,
            checks=checks,
        )
        if not written:
            terminal.warn(f"note: {target / huggingface.CARD} is kept: delete it for a new one")
    trained = sum(array.size for array in loaded.params.values())
    more = ""
    if count > trained:
        more = f" ({count - trained:+,} that the exported format adds)"
    elif count < trained:  # such as a discriminator's
        more = f" ({trained - count:,} more are only for training and were not exported)"
    exported = min(trained, count)
    terminal.out(f"{loaded.source}: {exported:,} parameters of {name}{more}")
    for sentence in checks:
        terminal.out(sentence)
    if flags.format == "comfyui":
        terminal.out(
            f"float16. Put it into ComfyUI's models/vae for the node Load VAE, or into "
            f"models/vae_approx, as {usual}{tensor_files.SAFETENSORS}, for previews."
        )
    return target, name


def import_from(flags: commands.Import) -> int:
    """Runs the command."""
    flags = dataclasses.replace(flags, source=hub.local(flags.source))
    if huggingface.is_model_folder(flags.source):
        return _import_folder(flags)
    if flags.target.suffix != tensor_files.SAFETENSORS:
        raise InputError(
            f"OUT {flags.target} does not end with {tensor_files.SAFETENSORS}: import writes only "
            f"this format; {invocation.program()} export writes .pth"
        )
    if flags.target.exists() and flags.target.samefile(flags.source):
        raise InputError(f"OUT {flags.target} is the same file as IN: choose another one")
    atomic.check_writable("OUT", flags.target)
    tensors, about = tensor_files.read(flags.source)
    if weights.ABOUT in about:
        model = weights.load(flags.source).model
        if model.task != "reconstruct":
            raise load.cannot(model, "import", "reconstruct", source=flags.source)
        if from_file.name_of(model) != "video_ae":
            return _import_recognized(flags, model, tensors)
    elif (kind := from_file.recognized(tensors)) is not None:
        return _import_recognized(flags, kind.guess(tensors, str(flags.source)), tensors)
    else:
        model = video_ae.Config.guess(tensors, str(flags.source))
    if flags.trim is not None:
        # Any number of frames that H3 can take.
        frames = timing.Timing(trim="h3").decoded(2) if flags.trim == "h3" else model.frames
        model = dataclasses.replace(model, trim=flags.trim, frames=frames)
    params = model.from_weights(tensors, str(flags.source))
    if weights.ABOUT not in about and flags.trim is None:
        unclear = video_ae.Config.ambiguity(tensors, str(flags.source))
        if unclear:
            raise InputError(unclear)
    weights.save(flags.target, model, params)
    terminal.out(f"{flags.source}: {described(model, params)}\nwrote {flags.target}")
    return 0


def _import_recognized(
    flags: commands.Import, model: Any, tensors: Mapping[str, np.ndarray]
) -> int:
    _refuse_trim(flags, "a small video autoencoder")
    params = model.from_weights(tensors, str(flags.source))
    weights.save(flags.target, model, params)
    fields = ", ".join(f"{name} {value}" for name, value in from_file.in_weights(model).items())
    terminal.out(
        f"{flags.source}: {from_file.name_of(model)}, {fields}; "
        f"{state_size.parameter_count(params):,} parameters\nwrote {flags.target}"
    )
    return 0


def _refuse_trim(flags: commands.Import, other: str) -> None:
    if flags.trim is not None:
        raise InputError(f"{flags.source} is not {other}: drop --trim")


def _import_folder(flags: commands.Import) -> int:
    _refuse_trim(flags, "a video autoencoder")
    if flags.target.suffix in tensor_files.ENDINGS:
        raise InputError(
            f"OUT {flags.target} must be a folder, because {flags.source} is one, with a tokenizer"
        )
    if flags.target.exists() and flags.target.samefile(flags.source):
        raise InputError(f"OUT {flags.target} is the same folder as IN: choose another one")
    loaded = weights.load(flags.source)
    if loaded.model.diffusers_class:
        raise InputError(
            f"{flags.source} needs no import: pass it to --model.init_from, or to a command in "
            "place of a run directory"
        )
    path = tokenizer.beside(flags.source)
    loaded_tokenizer = tokenizer.of_source(path)
    huggingface.check_target(flags.target)
    huggingface.write(flags.target, loaded.model, loaded.params, loaded_tokenizer, path)
    size = loaded.model.to_settings()
    terminal.out(
        f"{flags.source}: {size['architectures'][0]} of {size['num_hidden_layers']} layers, "
        f"{size['num_attention_heads']} heads, width {size['hidden_size']}, "
        f"{size['vocab_size']:,} tokens, {size['max_position_embeddings']} positions; "
        f"{state_size.parameter_count(loaded.params):,} parameters\nwrote {flags.target}"
    )
    return 0


def described(model: video_ae.Config, params: weights.Params) -> str:
    """Describes a model and its parameters in one line."""
    kind = "TAEHV with the super decoder" if model.decoder == "super" else "TAEHV"
    counts = {
        prefix: sum(array.size for name, array in params.items() if name.startswith(prefix))
        for prefix in ("encoder.", "decoder.")
    }
    dropped = model.timing.factor - 1
    trim = {
        "always": f"first {dropped} frames dropped",
        "odd_latents": f"first {dropped} frames dropped only for an odd number of latents "
        "(CogVideoX)",
        "h3": "chunks of 17 frames (MiniMax H3)",
    }[model.trim]
    return (
        f"{kind}, patches of {model.patch_size}x{model.patch_size}, {model.latent_channels} latent "
        f"channels per {model.timing.factor} frames, {trim}; "
        f"{state_size.parameter_count(params):,} parameters "
        f"(encoder {counts['encoder.']:,}, decoder {counts['decoder.']:,})"
    )
