"""Draws the diagrams of architecture.md; `python docs/diagrams.py` writes them to docs/.

The contents come from the code: the order of the packages from the test that enforces it, the
purpose of a package from its docstring, and the layout of arrays from `jaxtrain.sharding`. A test
fails if the committed files are out of date.
"""

import ast
import math
from html import escape
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent

# An image cannot use the page's colors, but it can follow the reader's color scheme.
_STYLE = """
    text { font: 14px system-ui, sans-serif; fill: #1f2328 }
    .name { font-weight: 600 }
    .small { font-size: 12px; fill: #59636e }
    .box { fill: #f6f8fa; stroke: #afb8c1 }
    .stored { fill: #b6e3ff; stroke: #0969da }
    .gathered { fill: #fff8c5; stroke: #9a6700 }
    .line { stroke: #59636e; stroke-width: 1.5; fill: none }
    .head { fill: #59636e }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3 }
      .small { fill: #9198a1 }
      .box { fill: #161b22; stroke: #3d444d }
      .stored { fill: #0c2d6b; stroke: #58a6ff }
      .gathered { fill: #3b2300; stroke: #d29922 }
      .line { stroke: #9198a1 }
      .head { fill: #9198a1 }
    }"""


class Drawing:
    """An SVG under construction.

    Args:
        width, height: in pixels.
        title: for screen readers.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">',
            f"  <title>{escape(title)}</title>",
            f"  <style>{_STYLE}\n  </style>",
            '  <defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path class="head" d="M0 0 L8 4 L0 8 z"/>'
            "</marker></defs>",
        ]

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box") -> None:
        """Adds a rectangle; ``kind`` is its CSS class."""
        self._parts.append(
            f'  <rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            'rx="5"/>'
        )

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Adds a line of text; ``y`` is its baseline."""
        self._parts.append(
            f'  <text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">'
            f"{escape(words)}</text>"
        )

    def arrow(self, *points: tuple[float, float]) -> None:
        """Adds a line through points, with an arrowhead at the last."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'  <path class="line" d="M{path}" marker-end="url(#end)"/>')

    def svg(self) -> str:
        """Returns the contents of the file."""
        return "\n".join([*self._parts, "</svg>", ""])


# The path of a batch from a file to a checkpoint: each module and its output.
FLOW = (
    (("data/sampler.py", "one global order of examples"),),
    (
        ("data/video/clips.py", "in worker processes: a clip from a file"),
        ("data/text/windows.py", "in worker processes: a piece of text"),
    ),
    (("data/pipeline.py", "a global batch on the devices"),),
    (("training/step.py", "step(state, batch, scalars) -> (state, metrics)"),),
    (("training/loop.py", "validates and saves when due, stops on a signal"),),
    (
        ("checkpoint/saver.py", "state, examples seen, checksums"),
        ("telemetry/events.py", "console, log, metrics, TensorBoard"),
    ),
)


def flow() -> str:
    """Draws the flow of data from a file to a step to a checkpoint."""
    wide, high, gap = 300, 52, 30
    drawing = Drawing(700, 20 + len(FLOW) * (high + gap), "How data flows through a run")
    for row, stages in enumerate(FLOW):
        y = 10 + row * (high + gap)
        for column, (module, output) in enumerate(stages):
            middle = 350 if len(stages) == 1 else (180, 520)[column]
            drawing.box(middle - wide / 2, y, wide, high)
            drawing.text(middle, y + 22, module, "name", "middle")
            drawing.text(middle, y + 41, output, "small", "middle")
            if row + 1 < len(FLOW):
                below = FLOW[row + 1]
                for other in range(len(below)):
                    target = 350 if len(below) == 1 else (180, 520)[other]
                    drawing.arrow((middle, y + high), (target, y + high + gap - 1))
    return drawing.svg()


def order() -> tuple[str, ...]:
    """Returns the packages, top first, from the test of their imports.

    Raises:
        LookupError: the test has no order.
    """
    tree = ast.parse((CHECKOUT / "tests" / "test_layout.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ORDER":
            return tuple(
                str(leaf.value) for leaf in ast.walk(node.value) if isinstance(leaf, ast.Constant)
            )
    raise LookupError("tests/test_layout.py has no ORDER")


def purpose(name: str) -> str:
    """Returns the first sentence of the docstring of a package or module."""
    base = CHECKOUT / "jaxtrain" / name
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    words = " ".join(
        (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split()
    )
    return words.replace("``", "").replace("`", "").partition(". ")[0].rstrip(".")


def packages() -> str:
    """Draws the packages in their order."""
    names = [name for name in order() if name != "__main__"]
    high = 34
    drawing = Drawing(900, 20 + len(names) * high, "Packages; each imports only those below it")
    drawing.arrow((30, 16), (30, 12 + len(names) * high))
    for row, name in enumerate(names):
        y = 10 + row * high
        folder = (CHECKOUT / "jaxtrain" / name).is_dir()
        drawing.box(50, y, 130, high - 6, "box")
        drawing.text(115, y + 19, f"{name}/" if folder else f"{name}.py", "name", "middle")
        words = purpose(name)
        drawing.text(195, y + 19, words if len(words) <= 110 else words[:107] + "...", "small")
    return drawing.svg()


def stored() -> dict[str, int]:
    """Returns ``mesh.shard`` -> over how many of 2 x 4 devices an array of the state is sharded."""
    from jax.sharding import AbstractMesh

    from jaxtrain import config, sharding

    sizes = {"data": 2, "fsdp": 4}
    devices = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    array = np.empty((1024, 1024), np.float32)
    found = {}
    for mode in _WORDS:
        settings = config.Mesh(data=2, fsdp=4, shard=mode, min_shard_elements=1)
        spec = sharding.ShardingRule(devices, settings)(array).spec
        found[mode] = math.prod(sizes[axis] for axis in spec if axis is not None)
    return found


_WORDS = {
    "params": ("mesh.shard params (ZeRO-3)", "each parameter is gathered where the model uses it"),
    "optimizer": ("mesh.shard optimizer (ZeRO-2)", "all parameters are gathered once per step"),
    "none": ("mesh.shard none", "every device stores everything; gradients are summed"),
}


def mesh() -> str:
    """Draws a mesh of 2 x 4 devices, and what each device stores for each ``mesh.shard``."""
    drawing = Drawing(900, 585, "A mesh of data 2 x fsdp 4, and what each device stores")
    for row, (mode, split) in enumerate(stored().items()):
        top = 14 + row * 182
        title, what = _WORDS[mode]
        drawing.text(10, top + 12, title, "name")
        drawing.text(10, top + 32, what, "small")
        for data in range(2):
            drawing.text(10, top + 66 + data * 66, f"data {data}", "small")
            for fsdp in range(4):
                x, y = 70 + fsdp * 205, top + 42 + data * 66
                drawing.box(x, y, 195, 58)
                for line, name in enumerate(("parameters", "gradients", "optimizer")):
                    width = 78 / split
                    at = x + 92 + (fsdp * width if split > 1 else 0)
                    drawing.text(x + 8, y + 17 + line * 17, name, "small")
                    if name == "parameters" and mode == "optimizer":
                        drawing.box(x + 92, y + 7, 78, 11, "gathered")
                    drawing.box(at, y + 7 + line * 17, width, 11, "stored")
    for x, kind, words in (
        (70, "stored", "stored on this device"),
        (240, "gathered", "gathered for a step"),
    ):
        drawing.box(x, 562, 24, 11, kind)
        drawing.text(x + 32, 572, words, "small")
    return drawing.svg()


DRAWN = {"data_flow.svg": flow, "packages.svg": packages, "mesh.svg": mesh}


def main() -> None:
    """Writes all diagrams."""
    for name, draw in DRAWN.items():
        (HERE / name).write_text(draw())


if __name__ == "__main__":
    main()
