"""``jaxtrain import``: reads published weights."""

import dataclasses
from typing import Any

from jaxtrain import terminal
from jaxtrain.cli import commands
from jaxtrain.config import invocation
from jaxtrain.data.text import tokenizer
from jaxtrain.errors import InputError
from jaxtrain.inference import load
from jaxtrain.interop import hub, huggingface, weights
from jaxtrain.models import video_ae
from jaxtrain.models.video_ae import network, timing
from jaxtrain.storage import atomic, tensor_files
from jaxtrain.training import state

_SHAPES = ("patch_size", "latent_channels", "decoder")


def main(flags: commands.Import) -> int:
    """Runs the command.

    Raises:
        InputError: wrong use, or weights of an unknown model.
    """
    flags = dataclasses.replace(flags, source=hub.local(flags.source))
    if huggingface.is_one(flags.source):
        return _folder(flags)
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
    else:
        model = video_ae.Config.guess(tensors, str(flags.source))
    model = _changed(model, flags)
    params = model.from_weights(tensors, str(flags.source))
    if weights.ABOUT not in about and flags.trim is None:
        unclear = video_ae.Config.ambiguity(tensors, str(flags.source))
        if unclear:
            raise InputError(unclear)
    weights.save(flags.target, model, params)
    terminal.out(f"{flags.source}: {described(model, params)}\nwrote {flags.target}")
    return 0


def _folder(flags: commands.Import) -> int:
    given = [f"--{name.replace('_', '-')}" for name in (*_SHAPES, "trim") if getattr(flags, name)]
    if given:
        raise InputError(f"{flags.source} is not a video autoencoder: drop {', '.join(given)}")
    if flags.target.suffix in tensor_files.ENDINGS:
        raise InputError(
            f"OUT {flags.target} must be a folder, because {flags.source} is one, with a tokenizer"
        )
    if flags.target.exists() and flags.target.samefile(flags.source):
        raise InputError(f"OUT {flags.target} is the same folder as IN: choose another one")
    found = weights.load(flags.source)
    path = tokenizer.beside(flags.source)
    words = tokenizer.of_source(path)
    huggingface.check_target(flags.target)
    huggingface.write(flags.target, found.model, found.params, words, path)
    size = found.model.to_settings()
    terminal.out(
        f"{flags.source}: {size['architectures'][0]} of {size['num_hidden_layers']} layers, "
        f"{size['num_attention_heads']} heads, width {size['hidden_size']}, "
        f"{size['vocab_size']:,} tokens, {size['max_position_embeddings']} positions; "
        f"{state.parameter_count(found.params):,} parameters\nwrote {flags.target}"
    )
    return 0


def described(model: video_ae.Config, params: weights.Params) -> str:
    """Describes a model and its parameters in one line."""
    kind = "TAEHV with the super decoder" if model.decoder == "super" else "TAEHV"
    counts = {
        part: sum(array.size for name, array in params.items() if name.startswith(part))
        for part in ("encoder.", "decoder.")
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
        f"{state.parameter_count(params):,} parameters "
        f"(encoder {counts['encoder.']:,}, decoder {counts['decoder.']:,})"
    )


def _changed(model: video_ae.Config, flags: commands.Import) -> video_ae.Config:
    """Returns the guessed model with the changes of the flags."""
    given: dict[str, Any] = {
        name: getattr(flags, name)
        for name in (*_SHAPES, "trim")
        if getattr(flags, name) is not None
    }
    if "patch_size" in given:
        side = network.SPACE_FACTOR * given["patch_size"] * 2
        given |= {"height": side, "width": side}
    if given.get("trim") == "h3":
        given["frames"] = timing.Timing(trim="h3").decoded(2)  # any number that it can take
    return dataclasses.replace(model, **given)
