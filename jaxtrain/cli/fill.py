"""``jaxtrain fill``: predicts masked tokens."""

from jaxtrain import terminal
from jaxtrain.cli import commands
from jaxtrain.inference.fill_mask import MaskedModel
from jaxtrain.interop import hub


def main(flags: commands.Fill) -> int:
    """Runs the command.

    Raises:
        InputError: wrong use, or no such model.
    """
    filled = MaskedModel(hub.local(flags.source), flags.precision).fill(flags.text, flags.top)
    for number, guesses in enumerate(filled, 1):
        if len(filled) > 1:
            terminal.out(f"mask {number}")
        for one in guesses:
            terminal.out(f"{one.probability:8.4f}  {one.token}")
    return 0
