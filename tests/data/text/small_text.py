"""Text of random words, and a text data set as a run opens it."""

import dataclasses
import random
from pathlib import Path

import numpy as np

from jaxtrain.data.source import Source, Sources
from jaxtrain.data.text import Masked
from jaxtrain.data.text.masking import MaskedSource
from jaxtrain.models.contract import ModelConfig


@dataclasses.dataclass(frozen=True)
class Model(ModelConfig):
    """The fields of a model's config that text data reads."""

    sequence_length: int = 32
    vocab_size: int = 120
    mask_fraction: float = 0.15
    pad_id: int = 0
    attend: str = "sequence"
    init_from: str | None = None


def silent(text: str) -> None:
    pass


def write(folder: Path, files: int = 6) -> Path:
    """Writes text files of random sentences."""
    folder.mkdir()
    for number in range(files):
        rng = random.Random(number)
        words = ["".join(rng.choices("aeinorst", k=rng.randint(1, 8))) for _ in range(60)]
        sentences = [
            " ".join(rng.choices(words, k=rng.randint(1, 12))).capitalize() + "." for _ in range(60)
        ]
        (folder / f"{number}.txt").write_text("\n".join(sentences))
    return folder


def opened(path: Path | str, cache: Path, model: Model | None = None, **kwargs: object) -> Sources:
    config = Masked(path=str(path), batch_size=2, cache_dir=str(cache), **kwargs)  # type: ignore[arg-type]
    return config.open(model or Model(), seed=0, say=silent)


def sequences(source: Source) -> list[np.ndarray]:
    assert isinstance(source, MaskedSource)
    return [source.sequence(index) for index in range(len(source))]
