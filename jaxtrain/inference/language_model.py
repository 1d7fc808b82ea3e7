"""Uses a trained causal language model: generates text, and scores text.

Shapes: B texts in a batch, P tokens of a prompt, N tokens of a window, R windows in a batch, V
tokens of the vocabulary.
"""

import codecs
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.data.text import byte_level, specials, tokenizer, tokenizer_file
from jaxtrain.errors import InputError
from jaxtrain.inference import load
from jaxtrain.ops import chunked_loss, generation
from jaxtrain.ops.sampling import Choice
from jaxtrain.training import state
from jaxtrain.training.validation import weighted_means
from jaxtrain.xla import options

_LEAST_ROOM = 64  # positions of a KV cache
SHORTEST = 16  # tokens of a padded sequence: most sentences of BLiMP have fewer
_LARGEST_SEED = 2**32 - 1


class _Window(NamedTuple):
    """A window of a text that is scored.

    Attributes:
        sizes: bytes of each token.
    """

    ids: np.ndarray
    sizes: np.ndarray
    start: int


class Continuation(NamedTuple):
    """A sequence whose end is scored.

    Attributes:
        start: index of the first token that is predicted, at least 1.
    """

    tokens: np.ndarray
    start: int


@dataclasses.dataclass(frozen=True)
class TextScore:
    """How well a model predicts each token of a text from the tokens before it.

    Attributes:
        bytes: length of the text in UTF-8 bytes.
        loss: mean cross-entropy per token, nats.
        accuracy: fraction of tokens whose prediction was right.
        bits_per_byte: cross-entropy of the text per byte; comparable between tokenizers.
    """

    tokens: int
    bytes: int
    loss: float
    accuracy: float
    bits_per_byte: float

    @property
    def perplexity(self) -> float:
        """exp of the loss; depends on the tokenizer."""
        return math.exp(self.loss)


class CausalModel:
    """A model, its parameters on the first device, and its tokenizer.

    Args:
        source: a checkpoint, a run directory, or a folder with weights and a ``tokenizer.json``.
    """

    def __init__(
        self, source: Path, precision: str = "float32", *, command: str = "generate"
    ) -> None:
        tokenizer.check_travels(source)
        trained = load.load(source, command, "generate")
        self.model, self.source = trained.config, trained.source
        definition = trained.definition
        path = tokenizer.beside(Path(self.source))  # of these weights, not of others
        full_tokenizer = tokenizer_file.read(path)
        tokenizer.check_size(full_tokenizer, self.model.vocab_size, self.source)
        byte_level.check(full_tokenizer, self.source)
        marks = specials.marks(full_tokenizer, path)
        self._prompt, self.begin, self._ends = list(marks.prompt), marks.before[-1], marks.ends
        self.tokenizer = specials.plain(full_tokenizer)
        self.bytes_of: list[bytes | None] = byte_level.as_bytes(self.tokenizer)
        self._arrays = trained.on_device(precision)
        special = specials.marked(self.tokenizer)
        known_V = np.zeros(self.model.vocab_size, bool)
        known_V[
            [
                i
                for i, token_bytes in enumerate(self.bytes_of)
                if token_bytes is not None or i in special
            ]
        ] = 1

        def chosen(
            logits_BV: jax.Array, choice: Choice, keys_B: jax.Array, number: jax.Array
        ) -> jax.Array:
            # The model may have more tokens than the tokenizer; it was never trained on those.
            known_BV = jnp.broadcast_to(known_V[None], logits_BV.shape)
            return generation.choose(
                choice, jnp.where(known_BV, logits_BV, -jnp.inf), keys_B, number
            )

        def read(
            arrays: state.Arrays,
            tokens_BN: jax.Array,
            count: jax.Array,
            keys_B: jax.Array,
            number: jax.Array,
            capacity: int,
            choice: Choice,
        ) -> tuple[jax.Array, Any]:
            module = definition.module(arrays, {})
            empty = module.cache(tokens_BN.shape[0], capacity)
            logits_BV, kept = module.decode_step(tokens_BN, count, empty, 0)
            return chosen(logits_BV, choice, keys_B, number), kept

        def follow(
            arrays: state.Arrays,
            kept: Any,
            ids_B: jax.Array,
            start: jax.Array,
            keys_B: jax.Array,
            number: jax.Array,
            choice: Choice,
        ) -> tuple[jax.Array, Any]:
            module = definition.module(arrays, {})
            logits_BV, kept = module.decode_step(ids_B[:, None], 1, kept, start)
            return chosen(logits_BV, choice, keys_B, number), kept

        compiler_options = options.options(jax.default_backend())
        self._read: Callable[..., tuple[jax.Array, Any]] = jax.jit(
            read, static_argnames=("capacity", "choice"), compiler_options=compiler_options
        )
        self._follow: Callable[..., tuple[jax.Array, Any]] = jax.jit(
            follow, static_argnames="choice", donate_argnums=1, compiler_options=compiler_options
        )

        def evaluate(arrays: state.Arrays, batch: chunked_loss.Batch) -> chunked_loss.Sums:
            sums: chunked_loss.Sums = definition.module(arrays, {}).evaluate(batch)
            return sums

        self._evaluate: Callable[..., chunked_loss.Sums] = jax.jit(
            evaluate, compiler_options=compiler_options
        )

        def predict(arrays: state.Arrays, batch: chunked_loss.Batch) -> tuple[jax.Array, jax.Array]:
            predictions = definition.module(arrays, {}).predict(batch)
            return predictions.cost.sum(1), predictions.right.sum(1)

        self._predict: Callable[..., tuple[jax.Array, jax.Array]] = jax.jit(
            predict, compiler_options=compiler_options
        )

    @property
    def longest(self) -> int:
        """Length of the context window, in tokens."""
        return int(self.model.sequence_length)

    @property
    def _stride(self) -> int:
        """Distance between windows of a long text, in tokens."""
        return max(1, self.longest // 2)

    def encode(self, prompt: str) -> list[int]:
        """Returns the token that begins a document, if the model has one, and those of a text."""
        if not prompt:
            raise InputError("the prompt is empty: pass at least one word")
        ids = self._prompt + tokenizer_file.ids(self.tokenizer, prompt)
        if len(ids) > self.longest:
            begun = " with the one that begins it" if self._prompt else ""
            raise InputError(
                f"the prompt has {len(ids)} tokens{begun}, but the context "
                f"window has {self.longest}: pass only its last part"
            )
        return ids

    def ids(
        self,
        prompt: list[int],
        *,
        tokens: int,
        choice: Choice,
        seed: int = 0,
        samples: int = 1,
        say: Callable[[str], None] = lambda _: None,
    ) -> Iterator[np.ndarray]:
        """Generates tokens, yielding int32 [B] for each position; text b does not depend on B.

        When the context window is full, the model restarts with the last half of it, so it always
        sees at least half a window. Positions are not extrapolated, and older tokens are forgotten.
        """
        self._check(tokens, choice, samples, seed)
        keys_B = generation.keys_of_rows(seed, samples)
        window = [np.full(samples, token, np.int32) for token in prompt]
        length = min(len(prompt) + tokens, self.longest)
        capacity, half = padded(length, self.longest), max(1, self.longest // 2)

        def begun(number: int) -> tuple[jax.Array, Any]:
            tokens_BN = np.zeros((samples, padded(len(window), capacity)), np.int32)
            tokens_BN[:, : len(window)] = np.stack(window, axis=1)
            return self._read(
                self._arrays,
                tokens_BN,
                len(window),
                keys_B,
                number,
                capacity=capacity,
                choice=choice,
            )

        ids_B, kept = begun(0)
        for number in range(1, tokens + 1):
            drawn_B = ids_B
            if number < tokens and len(window) < self.longest:
                # Dispatch the next token before the host waits for this one.
                ids_B, kept = self._follow(
                    self._arrays, kept, drawn_B, len(window), keys_B, number, choice=choice
                )
                window.append(np.asarray(drawn_B))
            elif number < tokens:
                if number == self.longest - len(prompt) + 1:  # the first time
                    say(
                        f"the context window of {self.longest} tokens is full: from here on the "
                        f"model sees only the last {half} to {self.longest} tokens"
                    )
                window = [*window, np.asarray(drawn_B)][-half:]
                ids_B, kept = begun(number)
            yield np.asarray(drawn_B)

    def texts(self, ids: Iterator[np.ndarray]) -> Iterator[list[str]]:
        """Yields the characters that each token adds to each text; "" for part of a character.

        A text ends when the model generates a token that ends a document
        (:class:`jaxtrain.data.text.specials.Marks`); the iterator ends when all have. Other special
        tokens add nothing. An incomplete last character becomes U+FFFD.
        """
        decoders: list[Any] | None = None
        ended: list[bool] = []
        for ids_B in ids:
            if decoders is None:
                make = codecs.getincrementaldecoder("utf-8")
                decoders, ended = [make("replace") for _ in ids_B], [False] * len(ids_B)
            grown = []
            for row, token_id in enumerate(ids_B.tolist()):
                ended[row] |= token_id in self._ends
                token = None if ended[row] else self.bytes_of[token_id]
                grown.append(decoders[row].decode(token or b"", final=ended[row]))
            yield grown
            if all(ended):
                return
        if decoders is not None and any(
            last_texts := [decoder.decode(b"", final=True) for decoder in decoders]
        ):
            yield last_texts

    def count(self, text: str) -> int:
        """Returns the number of tokens of a text."""
        return len(tokenizer_file.ids(self.tokenizer, text))

    def document(self, text: str) -> np.ndarray:
        """Returns the token that begins a document and those of a text, int32."""
        return np.array([self.begin, *tokenizer_file.ids(self.tokenizer, text)], np.int32)

    def predict(
        self, continuations: Sequence[Continuation], rows: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Predicts the end of each sequence from its beginning.

        Args:
            continuations: sequences of at most :attr:`longest` tokens.

        Returns:
            The mean loss per token in nats, float64, and whether each token is the most likely one,
            bool; one per sequence.
        """
        cost, right = (np.zeros(len(continuations)) for _ in range(2))
        lengths = np.array([len(continuation.tokens) - 1 for continuation in continuations])
        order = np.argsort(lengths, kind="stable")  # batches of similar length need less padding
        for first in range(0, len(order), rows):
            chosen = order[first : first + rows]
            shape = rows, padded(int(lengths[chosen].max()), self.longest, SHORTEST)
            batch = self._empty(shape)
            for row, index in enumerate(chosen):
                tokens, start = continuations[index]
                batch["tokens"][row, : len(tokens) - 1] = tokens[:-1]
                batch["targets"][row, start - 1 : len(tokens) - 1] = tokens[start:]
            sums = jax.device_get(self._predict(self._arrays, batch))
            cost[chosen], right[chosen] = (total[: len(chosen)] for total in sums)
        counts = lengths + 1 - np.array([continuation.start for continuation in continuations])
        return cost / counts, right == counts

    def log_probabilities(self, texts: Sequence[str], rows: int) -> np.ndarray:
        """Returns the logarithm of each text's probability after the begin token, float64, in nats.

        Args:
            texts: texts of at least one token.
        """
        documents = [self.document(text) for text in texts]
        for text, tokens in zip(texts, documents, strict=True):
            if len(tokens) - 1 > self.longest:
                raise too_long(text, len(tokens) - 1, self.longest)
        losses, _ = self.predict([Continuation(tokens, 1) for tokens in documents], rows)
        counts = np.array([len(tokens) - 1 for tokens in documents])
        return np.asarray(-losses * counts)

    def score(
        self,
        texts: Sequence[str],
        *,
        rows: int,
        max_tokens: int | None,
        each: Callable[[int, int], None],
    ) -> TextScore:
        """Predicts each token of each text from the tokens before it in the same text.

        The first is predicted from the begin token; from the one that ends the previous document,
        if the model has no begin token.

        Windows have the length of the context window and overlap by half. A token is scored once,
        in the first window that contains it: with at least half a window before it, if the text has
        as much.

        Args:
            max_tokens: score only the first ``max_tokens`` tokens; None is all.
        """
        windows: list[_Window] = []
        tokens = size = 0
        for text in texts:
            left = None if max_tokens is None else max_tokens - tokens
            ids = tokenizer_file.ids(self.tokenizer, text)[:left]
            if not ids:
                continue
            sizes = np.array([len(self.bytes_of[token] or b"") for token in ids], np.int32)
            all_ids = np.array([self.begin, *ids], np.int32)
            starts = range(0, max(1, len(ids) - self.longest + self._stride), self._stride)
            windows += [_Window(all_ids, sizes, start) for start in starts]
            tokens += len(ids)
            size += int(sizes.sum())
        if not tokens:
            raise InputError("the text has no tokens")
        sums: dict[str, np.ndarray] = {}
        for first in range(0, len(windows), rows):
            batch = self._windows(windows[first : first + rows], rows)
            for name, totals in jax.device_get(self._evaluate(self._arrays, batch)).items():
                sums[name] = sums.get(name, np.zeros(2)) + np.asarray(totals, np.float64)
            each(min(first + rows, len(windows)), len(windows))
        means = weighted_means({name: tuple(totals) for name, totals in sums.items()})
        return TextScore(
            tokens=tokens,
            bytes=size,
            loss=means["loss"],
            accuracy=means["accuracy"],
            bits_per_byte=means["bits_per_byte"],
        )

    def _windows(self, windows: Sequence[_Window], rows: int) -> dict[str, np.ndarray]:
        """Makes a batch of windows; tokens that an earlier window has scored are not targets."""
        batch = self._empty((rows, self.longest))
        for row, (ids, sizes, start) in enumerate(windows):
            count = min(self.longest, len(sizes) - start)
            new = slice(self.longest - self._stride if start else 0, count)
            batch["tokens"][row, :count] = ids[start : start + count]
            batch["targets"][row, new] = ids[start + 1 : start + 1 + count][new]
            batch["target_bytes"][row, new] = sizes[start : start + count][new]
        return batch

    def _empty(self, shape: tuple[int, int]) -> dict[str, np.ndarray]:
        return {
            "tokens": np.full(shape, self.begin, np.int32),
            "targets": np.full(shape, chunked_loss.IGNORED, np.int32),
            "target_bytes": np.zeros(shape, np.int32),
            "weight": np.ones(shape[0], np.float32),
        }

    def _check(self, tokens: int, choice: Choice, samples: int, seed: int) -> None:
        for name, value in (("tokens", tokens), ("samples", samples)):
            if value < 1:
                raise InputError(f"{name} {value}: use at least 1")
        if not 0 <= seed <= _LARGEST_SEED:
            raise InputError(f"seed {seed}: use a number from 0 to {_LARGEST_SEED}")
        vocab_size = self.model.vocab_size
        if choice.top_k is not None and choice.top_k > vocab_size:
            raise InputError(
                f"top_k {choice.top_k}: use a number from 1 to {vocab_size} (vocabulary)"
            )


def too_long(text: str, tokens: int, limit: int) -> InputError:
    """Returns the error for a text that must fit into the context window."""
    return InputError(
        f"{text!r:.100} has {tokens} tokens, but the context window has {limit}: use a model with "
        "longer sequences"
    )


def padded(count: int, limit: int, minimum: int = _LEAST_ROOM) -> int:
    """Rounds ``count`` positions up to a power of two, at least ``minimum`` and at most ``limit``.

    Prompts of all lengths then share a few compiled functions.
    """
    return min(limit, max(minimum, 1 << (count - 1).bit_length()))
