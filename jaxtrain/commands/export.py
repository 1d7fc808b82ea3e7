"""Weights out, under the names and in the layout of the program that the model comes from.

SOURCE is a checkpoint, a run's directory (its best checkpoint, or else its newest) or a weights
file. It says which model it is. A .pth needs PyTorch: pip install -e '.[interop]'.
"""

import argparse

from jaxtrain import files, state, tensor_files, weights
from jaxtrain.commands import command_line
from jaxtrain.errors import InputError


def main(arguments: list[str]) -> int:
    """Runs the command.

    Raises:
        InputError: wrong use, or the source holds no model that can be exported.
    """
    flags = command_line.parse_all(_parser(), arguments)
    if flags is None:
        return 0
    tensor_files.check_ending(flags.target)
    files.check_writable("OUT", flags.target)
    if flags.target.suffix != tensor_files.SAFETENSORS:
        tensor_files.check_pytorch(flags.target)  # before a large checkpoint is read
    found = weights.load(flags.source, None)
    if not hasattr(found.model, "to_weights"):
        raise InputError(
            f"{found.source} holds a model of {type(found.model).__module__}, which has no names "
            "in another program (to_weights): there is nothing to export it to"
        )
    weights.save(flags.target, found.model, found.params)
    count = state.parameter_count(found.params)
    print(f"{found.source}: {count:,} parameters of {type(found.model).__module__}")
    print(f"written to {flags.target}")
    return 0


def _parser() -> argparse.ArgumentParser:
    usage = "jaxtrain export SOURCE OUT.{safetensors,pth}"
    parser = command_line.bare_parser("export", usage, __doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", type=command_line.named_file, help="what is exported")
    add("target", metavar="OUT", type=command_line.named_file, help="where it is written")
    return parser
