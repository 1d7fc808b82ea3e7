"""Published weights in: checks names and shapes, says which they are.

The file that is written also says which model it belongs to, so that every command and
--model.init_from take it as it is. A .pth needs PyTorch.

IN may also be a folder of transformers' BertForMaskedLM, LlamaForCausalLM or NanoChatForCausalLM
with its tokenizer. OUT is then such a folder too, with what our model has; the pooler and the
next-sentence head of BertForPreTraining are left out.
"""

import argparse
import dataclasses
from typing import Any

from jaxtrain import terminal
from jaxtrain.cli import command_line
from jaxtrain.config import invocation
from jaxtrain.data.text import tokenizer
from jaxtrain.errors import InputError
from jaxtrain.inference import load
from jaxtrain.interop import huggingface, weights
from jaxtrain.models import video_ae
from jaxtrain.models.video_ae import network
from jaxtrain.storage import atomic, tensor_files
from jaxtrain.training import state

_SHAPES = ("patch_size", "latent_channels", "decoder")


def main(arguments: list[str]) -> int:
    """Runs the command.

    Raises:
        InputError: wrong use, or the weights are of no known model.
    """
    flags = command_line.parse_all(_parser(), arguments)
    if flags is None:
        return 0
    if huggingface.is_one(flags.source):
        return _folder(flags)
    if flags.target.suffix != tensor_files.SAFETENSORS:
        raise InputError(
            f"{flags.target}: imported weights are written as {tensor_files.SAFETENSORS}; "
            f"{invocation.program()} export writes .pth"
        )
    if flags.target.exists() and flags.target.samefile(flags.source):
        raise InputError(f"OUT {flags.target} is IN itself: name another file")
    atomic.check_writable("OUT", flags.target)
    tensors, about = tensor_files.read(flags.source)
    if weights.ABOUT in about:
        model = weights.load(flags.source).model
        if not load.has(model, "decode"):
            raise load.cannot(model, "import", "decode", source=flags.source)
    else:
        model = video_ae.Config.guess(tensors, str(flags.source))
    model = _changed(model, flags)
    params = model.from_weights(tensors, str(flags.source))
    weights.save(flags.target, model, params)
    terminal.out(f"{flags.source}: {described(model, params)}\nwritten to {flags.target}")
    return 0


def _folder(flags: argparse.Namespace) -> int:
    given = [f"--{name.replace('_', '-')}" for name in (*_SHAPES, "trim") if getattr(flags, name)]
    if given:
        raise InputError(f"{flags.source} is no video autoencoder: drop {', '.join(given)}")
    if flags.target.suffix in tensor_files.ENDINGS:
        raise InputError(
            f"{flags.target}: {flags.source} is a folder with a tokenizer: name a folder for it"
        )
    if flags.target.exists() and flags.target.samefile(flags.source):
        raise InputError(f"OUT {flags.target} is IN itself: name another folder")
    found = weights.load(flags.source)
    words = tokenizer.of_source(flags.source)
    huggingface.check_target(flags.target)
    huggingface.write(flags.target, found.model, found.params, words)
    size = found.model.to_settings()
    terminal.out(
        f"{flags.source}: {size['architectures'][0]} of {size['num_hidden_layers']} layers, "
        f"{size['num_attention_heads']} heads, width {size['hidden_size']}, "
        f"{size['vocab_size']:,} words, {size['max_position_embeddings']} positions; "
        f"{state.parameter_count(found.params):,} parameters\nwritten to {flags.target}"
    )
    return 0


def described(model: video_ae.Config, params: weights.Params) -> str:
    """One line on a model and its parameters."""
    kind = "TAEHV with the super decoder" if model.decoder == "super" else "TAEHV"
    counts = {
        part: sum(array.size for name, array in params.items() if name.startswith(part))
        for part in ("encoder.", "decoder.")
    }
    trim = "first frames kept where latents are even (CogVideoX)"
    return (
        f"{kind}, patches of {model.patch_size}x{model.patch_size}, {model.latent_channels} latent "
        f"channels, {trim if model.trim == 'odd_latents' else 'first 3 frames dropped'}; "
        f"{state.parameter_count(params):,} parameters "
        f"(encoder {counts['encoder.']:,}, decoder {counts['decoder.']:,})"
    )


def _changed(model: video_ae.Config, flags: argparse.Namespace) -> video_ae.Config:
    """The model that was guessed, or that the flags ask for instead."""
    given: dict[str, Any] = {
        name: getattr(flags, name)
        for name in (*_SHAPES, "trim")
        if getattr(flags, name) is not None
    }
    if "patch_size" in given:
        side = network.SPACE_FACTOR * given["patch_size"] * 2
        given |= {"height": side, "width": side}
    return dataclasses.replace(model, **given)


def _parser() -> argparse.ArgumentParser:
    usage = "jaxtrain import IN.{pth,safetensors} OUT.safetensors [--trim RULE], or DIR OUT"
    parser = command_line.bare_parser("import", usage, __doc__)
    add = parser.add_argument
    add(
        "source",
        metavar="IN",
        type=command_line.named_file,
        help="weights in the reference's names",
    )
    add("target", metavar="OUT", type=command_line.named_file, help="where ours are written")
    add(
        "--trim",
        choices=("always", "odd_latents"),
        help="when the first decoded frames are dropped; no array tells it, only a file name with "
        "taecvx (odd_latents)",
    )
    add("--patch-size", type=int, help="expect this (the arrays tell it)")
    add("--latent-channels", type=int, help="likewise")
    add("--decoder", choices=("base", "super"), help="likewise")
    return parser
