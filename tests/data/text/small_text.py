"""Text of random words, and a text data set as a run opens it."""

import dataclasses
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tokenizers

from jaxtrain.data.source import Source, Sources
from jaxtrain.data.text import Masked
from jaxtrain.data.text.masking import MaskedSource
from jaxtrain.data.text.windows import WindowSource
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


def token_ids(source: Source) -> list[int]:
    """Returns all tokens of a source of windows."""
    assert isinstance(source, WindowSource)
    ids: list[int] = []
    for index in range(len(source)):
        example = source.example(index)
        if source.streams.place(index)[1] == 0:  # the first token of a shard is not predicted
            ids.append(int(example["tokens"][0]))
        assert example["tokens"][0] == ids[-1]
        ids += example["targets"][example["targets"] >= 0].tolist()
    return ids


def documents_in(ids: list[int], decode: Callable[[list[int]], str]) -> list[str]:
    """Returns the documents of some tokens; each begins with the id 0."""
    starts = [at for at, token in enumerate(ids) if token == 0]
    assert starts[:1] == [0]
    return [decode(ids[a + 1 : b]) for a, b in itertools.pairwise([*starts, len(ids)])]


def words_of(sources: Sources) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a data set."""
    return tokenizers.Tokenizer.from_str(sources.files_to_keep["tokenizer.json"].decode())
