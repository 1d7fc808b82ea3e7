"""Uses a trained masked language model: predictions for masks, and pseudo-perplexity.

Shapes: R sequences in a batch, S tokens of a sequence, V tokens of the vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from jaxtrain.data.text import encoding, specials, tokenizer, tokenizer_file
from jaxtrain.errors import InputError
from jaxtrain.inference import load
from jaxtrain.inference.language_model import SHORTEST, padded, too_long
from jaxtrain.training import state

_MASKS = ("[MASK]", "<mask>")


@dataclasses.dataclass(frozen=True)
class Guess:
    """A prediction for a mask.

    Attributes:
        token: as the vocabulary writes it; in WordPiece, "##" continues a word.
        probability: probability of the token, 0 to 1.
    """

    token: str
    probability: float


@dataclasses.dataclass(frozen=True)
class MaskedScore:
    """How well a model predicts each token of a text from the tokens around it.

    Attributes:
        unknown: number of [UNK] tokens, which are skipped because training never predicts them.
        lost: fraction of the characters of the texts that the tokens do not have
            (:class:`jaxtrain.data.text.encoding.Encoded`).
        loss: mean cross-entropy per token, nats.
        accuracy: fraction of tokens whose prediction was right.
    """

    tokens: int
    unknown: int
    lost: float
    loss: float
    accuracy: float

    @property
    def pseudo_perplexity(self) -> float:
        """exp of the loss (Salazar et al., https://arxiv.org/abs/1910.14659)."""
        return math.exp(self.loss)


class MaskedModel:
    """A model, its parameters on the first device, and its tokenizer."""

    def __init__(self, source: Path, precision: str = "float32", *, command: str = "fill") -> None:
        tokenizer.check_travels(source)
        trained = load.load(source, command, "fill")
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
        """Longest text in tokens, without [CLS] and [SEP]."""
        return int(self.model.sequence_length) - 2

    def log_chances(self, tokens_RS: np.ndarray, position_R: np.ndarray) -> np.ndarray:
        """Log-probabilities of all tokens at one position per sequence, float32 [R, V]."""
        return np.asarray(self._chances(self._arrays, tokens_RS, position_R[:, None]))

    def fill(self, text: str, top: int) -> list[list[Guess]]:
        """Returns the most likely tokens for each mask of a text while the others stay masked.

        Args:
            text: has at least one [MASK], or the tokenizer's own mask token.
            top: number of tokens per mask.
        """
        own = str(self.tokenizer.id_to_token(self.special.mask))
        for mask in _MASKS:
            text = text.replace(mask, own)
        ids = tokenizer_file.ids(self.tokenizer, text)
        if self.special.mask not in ids:
            raise InputError(
                f"the text {text!r} has no {own}: put {own} where you want a prediction"
            )
        if len(ids) > self.longest:
            raise InputError(
                f"the text has {len(ids)} tokens, but the model takes at most {self.longest}: "
                "shorten it"
            )
        if not 1 <= top <= self.model.vocab_size:
            raise InputError(f"top {top}: use a number from 1 to {self.model.vocab_size}")
        row = self._row(np.asarray(ids, np.int32), self.model.sequence_length)
        guesses = []
        for position in np.flatnonzero(row == self.special.mask):
            chances = self.log_chances(row[None], np.array([position], np.int32))[0]
            best = np.argsort(-chances, kind="stable")[:top]
            guesses.append([Guess(self._written(i), math.exp(chances[i])) for i in best])
        return guesses

    def count(self, text: str) -> int:
        """Returns the number of tokens of a text, in which a literal "[MASK]" is ordinary text."""
        return len(tokenizer_file.ids(self._plain, text))

    def score(
        self,
        texts: Sequence[str],
        *,
        rows: int,
        max_tokens: int | None,
        each: Callable[[int, int], None],
    ) -> MaskedScore:
        """Masks the tokens of each text one at a time; predicts each from a full window around it.

        [UNK] is not masked, and a literal "[MASK]" in the text is ordinary text. In the middle of a
        long text, the window has as many tokens before the masked one as after it; near an end it
        has more on the other side.

        Args:
            max_tokens: mask only the first ``max_tokens`` tokens; None is all.
        """
        chosen: list[tuple[np.ndarray, int]] = []  # the tokens of a text, and one to mask
        tokens = characters = lost = 0
        losses = encoding.Losses(self._plain, self.special.unk)
        for text in texts:
            characters, lost = characters + len(text), lost + losses.of(text)
            ids = np.asarray(tokenizer_file.ids(self._plain, text), np.int32)
            scored = ids[: None if max_tokens is None else max_tokens - tokens]
            tokens += len(scored)
            chosen += [(ids, int(index)) for index in np.flatnonzero(scored != self.special.unk)]
        if not tokens:
            raise InputError("the text has no tokens")
        count, unknown = len(chosen), tokens - len(chosen)
        if not count:
            raise InputError(f"all {unknown} tokens of the text are unknown to the tokenizer")
        cost, right, begin = 0.0, 0, 0
        for tokens_RS, position_R, target_R in self._masked(chosen, rows):
            used = min(rows, count - begin)
            chances_RV = self.log_chances(tokens_RS, position_R)[:used]
            target_R = target_R[:used]
            cost -= float(chances_RV[np.arange(used), target_R].sum(dtype=np.float64))
            right += int((chances_RV.argmax(-1) == target_R).sum())
            begin += used
            each(begin, count)
        return MaskedScore(
            tokens=count,
            unknown=unknown,
            lost=lost / characters,
            loss=cost / count,
            accuracy=right / count,
        )

    def log_probabilities(self, texts: Sequence[str], rows: int) -> np.ndarray:
        """Returns texts' pseudo-log-likelihoods, float64, in nats, one token masked at a time."""
        chosen = list[tuple[np.ndarray, int, int]]()  # of which text, at last
        for number, text in enumerate(texts):
            ids = np.asarray(tokenizer_file.ids(self._plain, text), np.int32)
            if len(ids) > self.longest:
                raise too_long(text, len(ids), self.longest)
            chosen += [(ids, index, number) for index in range(len(ids))]
        chosen.sort(key=lambda entry: len(entry[0]))  # batches of similar length need less padding
        sums, scored = np.zeros(len(texts)), 0
        for tokens_RS, position_R, target_R in self._masked([entry[:2] for entry in chosen], rows):
            numbers = [number for *_, number in chosen[scored : scored + rows]]
            chances_RV = self.log_chances(tokens_RS, position_R)
            chances_R = chances_RV[np.arange(rows), target_R][: len(numbers)]
            np.add.at(sums, numbers, chances_R.astype(np.float64))
            scored += len(numbers)
        return sums

    def _masked(
        self, chosen: Sequence[tuple[np.ndarray, int]], rows: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yields batches of equal size; the last is padded with copies of its first sequence.

        Sequences of short texts have less padding than those of training.
        """
        for first in range(0, len(chosen), rows):
            batch = list(chosen[first : first + rows])
            batch += batch[:1] * (rows - len(batch))
            tokens, positions, targets = [], [], []
            longest = 2 + max(len(ids) for ids, _ in batch)
            size = padded(longest, self.model.sequence_length, SHORTEST)
            for ids, index in batch:
                length = min(self.longest, len(ids))
                start = min(max(index - length // 2, 0), len(ids) - length)
                row = self._row(ids[start : start + length], size)
                positions.append(1 + index - start)
                row[positions[-1]] = self.special.mask
                tokens.append(row)
                targets.append(ids[index])
            yield np.stack(tokens), np.asarray(positions, np.int32), np.asarray(targets, np.int32)

    def _row(self, ids: np.ndarray, size: int) -> np.ndarray:
        row = np.full(size, self.special.pad, np.int32)
        row[0] = self.special.cls
        row[1 : 1 + len(ids)] = ids
        row[1 + len(ids)] = self.special.sep
        return row

    def _written(self, token: int) -> str:
        text = self.tokenizer.id_to_token(int(token))
        if text is None:  # the model has more tokens than the tokenizer
            return f"unused id {token}"
        return self.tokenizer.decode([int(token)]).strip() or str(text)
