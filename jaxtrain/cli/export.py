"""Exports weights, with the names and layout of the model's original implementation.

SOURCE is a checkpoint, a run directory (its best checkpoint, else its newest)
or a weights file that jaxtrain wrote. A .pth file needs PyTorch. --format hf
writes a folder, with the tokenizer, that transformers' from_pretrained loads.
"""

import argparse
from pathlib import Path

from jaxtrain import terminal
from jaxtrain.cli import command_line
from jaxtrain.data.text import tokenizer
from jaxtrain.errors import InputError
from jaxtrain.interop import huggingface, weights
from jaxtrain.models import from_file
from jaxtrain.storage import atomic, tensor_files


def main(arguments: list[str]) -> int:
    """Runs the command.

    Raises:
        InputError: wrong use, or the source has no model that can be exported.
    """
    flags = command_line.parse_all(_parser(), arguments)
    if flags is None:
        return 0
    if flags.format == "hf":
        tokenizer.check_travels(flags.source)
        huggingface.check_target(flags.target)
    else:
        tensor_files.check_ending(flags.target)
        atomic.check_writable("OUT", flags.target)
        if flags.target.suffix != tensor_files.SAFETENSORS:
            tensor_files.check_pytorch(flags.target)  # before a large checkpoint is read
    found = weights.load(flags.source)
    name = from_file.name_of(found.model)
    needed = "to_settings" if flags.format == "hf" else "to_weights"
    if not hasattr(found.model, needed):
        able = [name for name, kind in from_file.configs() if hasattr(kind, needed)]
        raise InputError(
            f"{found.source}: the model {name} cannot be exported because it has no {needed}; "
            f"export can write {', '.join(sorted(able))}"
        )
    if flags.format == "hf":
        words = tokenizer.of_source(Path(found.source))
        count = huggingface.write(flags.target, found.model, found.params, words)
    else:
        count = weights.save(flags.target, found.model, found.params)
    own = sum(array.size for array in found.params.values())
    more = ""
    if count > own:
        more = f" ({count - own:+,} that the exported format adds)"
    elif count < own:  # such as a discriminator's
        more = f" ({own - count:,} more are only for training and were not exported)"
    shown = min(own, count)
    terminal.out(f"{found.source}: {shown:,} parameters of {name}{more}")
    terminal.out(f"wrote {flags.target}")
    return 0


def _parser() -> argparse.ArgumentParser:
    usage = (
        "jaxtrain export SOURCE OUT.safetensors|OUT.pth\n"
        "       jaxtrain export SOURCE DIR --format hf"
    )
    parser = command_line.bare_parser("export", usage, __doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", type=command_line.named_file, help="the model to export")
    add("target", metavar="OUT", type=command_line.named_file, help="the file or folder to write")
    add(
        "--format",
        choices=("file", "hf"),
        default="file",
        help="file: one weights file; hf: a folder for transformers (default: file)",
    )
    return parser
