"""Prints the most likely tokens for each [MASK] of a text, with their probabilities.

SOURCE is a checkpoint, a run directory or s3://BUCKET/PATH (best or else newest
checkpoint), a transformers folder (BertForMaskedLM), or hf:ORG/MODEL on the
Hub. Each mask is filled while the others stay masked.
"""

import argparse

from jaxtrain import terminal
from jaxtrain.cli import command_line
from jaxtrain.inference.fill_mask import MaskedModel
from jaxtrain.interop import hub


def main(arguments: list[str]) -> int:
    """Runs the command.

    Raises:
        InputError: wrong use, or no such model.
    """
    flags = command_line.parse_all(_parser(), arguments)
    if flags is None:
        return 0
    filled = MaskedModel(hub.local(flags.source), flags.precision).fill(flags.text, flags.top)
    for number, guesses in enumerate(filled, 1):
        if len(filled) > 1:
            terminal.out(f"mask {number}")
        for one in guesses:
            terminal.out(f"{one.probability:8.4f}  {one.token}")
    return 0


def _parser() -> argparse.ArgumentParser:
    usage = 'jaxtrain fill SOURCE "Paris is the [MASK] of France." [--top N]'
    parser = command_line.bare_parser("fill", usage, __doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", type=command_line.named_file, help="a masked language model")
    add("text", metavar="TEXT", help="a text with [MASK] where you want a prediction")
    add("--top", metavar="N", type=int, default=5, help="number of tokens per mask (default: 5)")
    command_line.add_precision(parser)
    command_line.add_config(parser)
    return parser
