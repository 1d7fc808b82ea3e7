"""A trained masked language model at work on texts: likely words for masks, and pseudo-perplexity.

Shapes: R rows at a time, S tokens of a row, V words.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

from jaxtrain.data.text import specials, tokenizer, tokenizer_file
from jaxtrain.errors import InputError
from jaxtrain.inference import load
from jaxtrain.training import state

_MASKS = ("[MASK]", "<mask>")


@dataclasses.dataclass(frozen=True)
class Guess:
    """A word for a mask.

    Attributes:
        token: as the vocabulary writes it; "##" continues a word of a WordPiece vocabulary.
        probability: of this word among all, 0 to 1.
    """

    token: str
    probability: float


@dataclasses.dataclass(frozen=True)
class MaskedScore:
    """How well a model tells each token of a text from all others.

    Attributes:
        tokens: that were masked, each in turn.
        unknown: others, which are [UNK]: left out, as training never asks for them.
        loss: mean cost of a token, nats.
        accuracy: share of tokens that were the likeliest.
    """

    tokens: int
    unknown: int
    loss: float
    accuracy: float

    @property
    def pseudo_perplexity(self) -> float:
        """exp of the mean cost (Salazar et al., https://arxiv.org/abs/1910.14659)."""
        return math.exp(self.loss)


class MaskedModel:
    """A model, its parameters on the first device, and its tokenizer.

    Args:
        source: a checkpoint, a run's directory, or a folder of transformers.
        precision: of the computation.
        command: that uses it, for messages.

    Raises:
        InputError: there is none, or of another kind; or jax does not see the GPU.
    """

    def __init__(self, source: Path, precision: str = "float32", *, command: str = "fill") -> None:
        tokenizer.check_travels(source)
        trained = load.load(source, command, "logits_at")
        self.model, self.source = trained.config, trained.source
        folder = Path(self.source)  # of these weights, not of others
        self.tokenizer = tokenizer.of_source(folder)
        tokenizer.check_size(self.tokenizer, self.model.vocab_size, self.source)
        self.special = specials.find(self.tokenizer, self.source)
        specials.check_padding(self.special, self.model.pad_id, self.source)
        self._plain = specials.plain(tokenizer.of_source(folder))
        self._arrays = trained.on_device(precision)
        definition = trained.definition

        def chances(
            arrays: state.Arrays, tokens_RS: jax.Array, position_R1: jax.Array
        ) -> jax.Array:
            logits = definition.module(arrays, {}).logits_at(tokens_RS, position_R1)
            return jax.nn.log_softmax(logits[:, 0])

        self._chances: Callable[..., jax.Array] = jax.jit(chances)

    @property
    def longest(self) -> int:
        """Tokens of a text that the model takes at once, without [CLS] and [SEP]."""
        return int(self.model.sequence_length) - 2

    def log_chances(self, tokens_RS: np.ndarray, position_R: np.ndarray) -> np.ndarray:
        """Logarithms of the probabilities of all words at one position a row, float32 [R, V]."""
        return np.asarray(self._chances(self._arrays, tokens_RS, position_R[:, None]))

    def fill(self, text: str, top: int) -> list[list[Guess]]:
        """The likeliest words for each mask of a text, the others being masked too.

        Args:
            text: with at least one [MASK], however the tokenizer writes it.
            top: words for each.

        Raises:
            InputError: no mask, or the text is too long.
        """
        own = str(self.tokenizer.id_to_token(self.special.mask))
        for mask in _MASKS:
            text = text.replace(mask, own)
        ids = tokenizer_file.ids(self.tokenizer, text)
        if self.special.mask not in ids:
            raise InputError(f"{text!r} has no {own}: write it where a word is to be found")
        if len(ids) > self.longest:
            raise InputError(
                f"the text has {len(ids)} tokens, the model takes {self.longest}: shorten it"
            )
        if not 1 <= top <= self.model.vocab_size:
            raise InputError(f"--top {top}: use a number from 1 to {self.model.vocab_size}")
        row = self._row(np.asarray(ids, np.int32))
        guesses = []
        for position in np.flatnonzero(row == self.special.mask):
            chances = self.log_chances(row[None], np.array([position], np.int32))[0]
            best = np.argsort(-chances, kind="stable")[:top]
            guesses.append([Guess(self._written(i), math.exp(chances[i])) for i in best])
        return guesses

    def count(self, text: str) -> int:
        """Tokens of a text; a literal "[MASK]" in it is ordinary pieces."""
        return len(tokenizer_file.ids(self._plain, text))

    def score(
        self, text: str, *, rows: int, max_tokens: int | None, each: Callable[[int, int], None]
    ) -> MaskedScore:
        """Masks each token of a text in turn, with as many tokens around it as the model takes.

        All but [UNK], which is left as it is; a literal "[MASK]" in the text is ordinary pieces. A
        token in the middle of a long text has half of them on each side; one near an end has
        more on the other side.

        Args:
            text: any length.
            rows: masked copies at a time.
            max_tokens: only those among so many first ones are masked; None is all.
            each: called after each batch with how many tokens are done, and are in all.

        Raises:
            InputError: the text has no token, or none that is known.
        """
        ids = np.asarray(tokenizer_file.ids(self._plain, text), np.int32)
        if not len(ids):
            raise InputError("there is no token in the text")
        known = np.flatnonzero(ids[:max_tokens] != self.special.unk)
        count, unknown = len(known), len(ids[:max_tokens]) - len(known)
        if not count:
            raise InputError(f"the vocabulary knows none of the {unknown} tokens of the text")
        cost, right, done = 0.0, 0, 0
        for tokens_RS, position_R, target_R in self._masked(ids, known, rows):
            used = min(rows, count - done)
            chances_RV = self.log_chances(tokens_RS, position_R)[:used]
            target_R = target_R[:used]
            cost -= float(chances_RV[np.arange(used), target_R].sum(dtype=np.float64))
            right += int((chances_RV.argmax(-1) == target_R).sum())
            done += used
            each(done, count)
        return MaskedScore(tokens=count, unknown=unknown, loss=cost / count, accuracy=right / count)

    def _masked(
        self, ids: np.ndarray, known: np.ndarray, rows: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Batches of one size; the last one is filled up with its first row."""
        length = min(self.longest, len(ids))
        for first in range(0, len(known), rows):
            chosen = known[first : first + rows].tolist()
            chosen += chosen[:1] * (rows - len(chosen))
            tokens, positions = [], []
            for index in chosen:
                start = min(max(index - length // 2, 0), len(ids) - length)
                row = self._row(ids[start : start + length])
                positions.append(1 + index - start)
                row[positions[-1]] = self.special.mask
                tokens.append(row)
            yield np.stack(tokens), np.asarray(positions, np.int32), ids[chosen]

    def _row(self, ids: np.ndarray) -> np.ndarray:
        """[CLS], tokens, [SEP], padding: int32 [S]."""
        row = np.full(self.model.sequence_length, self.special.pad, np.int32)
        row[0] = self.special.cls
        row[1 : 1 + len(ids)] = ids
        row[1 + len(ids)] = self.special.sep
        return row

    def _written(self, token: int) -> str:
        found = self.tokenizer.id_to_token(int(token))
        if found is None:  # the model has more words than the tokenizer
            return f"unused id {token}"
        return self.tokenizer.decode([int(token)]).strip() or str(found)
