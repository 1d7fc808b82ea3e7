"""The page's section with the images, clips, and texts of the validations."""

import base64
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtrain.reporting.markup import Html, element
from jaxtrain.reporting.run_files import RecordedRun
from jaxtrain.reporting.sections import heading, section
from jaxtrain.telemetry.samples import FOLDER, step_of

# Total size of the samples of one page, over all its runs, and of those that only its slider shows.
# Mail and browsers can handle that.
MOST_BYTES = 16 * 2**20
MOST_EARLIER_BYTES = 6 * 2**20
_MOST_STEPS = 60  # on the slider
_MOST_CHARACTERS = 20_000
_KINDS = {".txt": "text/plain", ".png": "image/png", ".mp4": "video/mp4"}  # in this order

_ROWS = (
    "Rows of a reconstruction: original, reconstruction, error (black = 0, white = 25% of the "
    "range)."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A file of ``samples/``."""

    name: str
    step: int
    path: Path
    size: int


def stored(directory: Path) -> list[list[Sample]]:
    """Finds the files in ``samples/``; texts first, then images, then clips.

    Returns:
        A list for each name, ordered by step; none is empty.
    """
    groups: dict[tuple[bool, int, str], list[Sample]] = {}
    for path in (directory / FOLDER).glob("*"):
        step = step_of(path)
        if step is not None:
            name = path.stem.rpartition("_")[0]
            sample = Sample(name=name, step=step, path=path, size=path.stat().st_size)
            key = (name == "latents", list(_KINDS).index(path.suffix), name)
            groups.setdefault(key, []).append(sample)
    return [sorted(groups[key], key=lambda sample: sample.step) for key in sorted(groups)]


def fitting(samples: Sequence[Sample], max_bytes: int) -> list[Sample]:
    """Returns the samples that fit into a number of bytes, smallest first."""
    kept: list[Sample] = []
    total = 0
    for sample in sorted(samples, key=lambda sample: sample.size):
        total += sample.size
        if total <= max_bytes:
            kept.append(sample)
    return kept


def slider_steps(samples: Sequence[Sample], max_bytes: int) -> list[int]:
    """Returns the earlier steps whose samples fit into the page: all, or every 2nd, 4th, and so on.

    Args:
        samples: those of earlier steps.
        max_bytes: of all of them.
    """
    sizes: dict[int, int] = {}
    for sample in samples:
        sizes[sample.step] = sizes.get(sample.step, 0) + sample.size
    steps = sorted(sizes)
    while len(steps) > _MOST_STEPS or sum(sizes[step] for step in steps) > max_bytes:
        steps = steps[1::2]
    return steps


def samples(runs: Sequence[RecordedRun]) -> Html:
    """Shows the newest images, clips, and texts, and with a slider those of earlier validations."""
    groups_of_runs = [stored(run.directory) for run in runs]
    newest = [group[-1] for groups in groups_of_runs for group in groups]
    kept = fitting(newest, MOST_BYTES)
    shown_groups = [[group for group in groups if group[-1] in kept] for groups in groups_of_runs]
    earlier = [sample for groups in shown_groups for group in groups for sample in group[:-1]]
    left = MOST_BYTES - sum(sample.size for sample in kept)
    chosen = set(slider_steps(earlier, min(left, MOST_EARLIER_BYTES)))
    steps = sorted(chosen | {sample.step for sample in kept})
    blocks: list[object] = []
    for index, groups in enumerate(shown_groups):
        if groups:
            figures = (
                _figure([*(sample for sample in group[:-1] if sample.step in chosen), group[-1]])
                for group in groups
            )
            blocks += [heading(runs, index), element("div", *figures, class_="samples")]
    notes = []
    if any(sample.name == "reconstruction" for sample in newest):
        notes.append(_ROWS)
    if more := len({sample.step for sample in earlier} - chosen):
        notes.append(
            f"The slider has {len(steps)} steps, to keep the page small; samples/ has {more} more."
        )
    if omitted := [sample for sample in newest if sample not in kept]:
        names = ", ".join(sample.path.name for sample in omitted)
        notes.append(f"Omitted to keep the page small: {names}.")
    return section("Samples", _slider(steps), *blocks, note=" ".join(notes)) if newest else Html("")


def _slider(steps: Sequence[int]) -> Html:
    """Builds the slider over the steps, which page.js shows; empty for a single step."""
    if len(steps) < 2:
        return Html("")
    slider = element(
        "input",
        type="range",
        id="sample-step",
        min="0",
        max=len(steps) - 1,
        value=len(steps) - 1,
        data_steps=" ".join(map(str, steps)),
    )
    output = element("output", f"{steps[-1]:,}", for_="sample-step")
    label = element("label", "step ", slider, output, class_="steps")
    return element("div", label, class_="controls", id="sample-controls", hidden=True)


def _figure(group: Sequence[Sample]) -> Html:
    """Builds a figure of one sample at several steps, of which page.js shows one."""
    newest = group[-1]
    step = element("span", f"{newest.step:,}", class_="at")
    caption = element("figcaption", f"{newest.name} ", element("small", "after step ", step))
    contents = [_content(sample, hidden=sample is not newest) for sample in group]
    text = newest.path.suffix == ".txt"
    return element("figure", caption, *contents, class_="text" if text else None)


def _content(sample: Sample, *, hidden: bool) -> Html:
    common: dict[str, Any] = {"data_step": sample.step, "hidden": hidden}
    try:
        content = sample.path.read_bytes()
    except OSError as error:
        reason = f"{sample.path.name} cannot be read ({error.strerror})."
        return element("p", reason, class_="none", **common)
    if sample.path.suffix == ".txt":
        text = content.decode(errors="replace")
        if (more := len(text) - _MOST_CHARACTERS) > 0:
            text = f"{text[:_MOST_CHARACTERS]}\n… {more:,} more characters"
        return element("pre", text, tabindex="0", **common)
    common["src"] = f"data:{_KINDS[sample.path.suffix]};base64,{base64.b64encode(content).decode()}"
    label = f"{sample.name} after step {sample.step:,}"
    if sample.path.suffix == ".png":
        return element("img", alt=label, **common)
    return element(
        "video",
        aria_label=label,
        autoplay=not hidden,
        controls=True,
        loop=True,
        muted=True,
        playsinline=True,
        preload="none" if hidden else "auto",
        tabindex="0",
        **common,
    )
