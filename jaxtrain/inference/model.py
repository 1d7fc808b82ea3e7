"""A trained model as :func:`jaxtrain.load_model` returns it: one object for all kinds of models."""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain import config
from jaxtrain.config import Precision
from jaxtrain.config.invocation import from_python
from jaxtrain.errors import InputError
from jaxtrain.inference import load
from jaxtrain.inference.evaluation import language_models
from jaxtrain.inference.fill_mask import Guess, MaskedModel
from jaxtrain.inference.language_model import CausalModel
from jaxtrain.inference.video.autoencoder import Autoencoder, fetched
from jaxtrain.interop import hub, weights
from jaxtrain.models import from_file
from jaxtrain.ops.sampling import Choice


class Model:
    """A trained model. Which methods it has depends on its kind; the others raise InputError.

    Args:
        source: a checkpoint, a run directory (its best checkpoint, or else its newest), a folder
            of transformers, a weights file, or ``hf:ORG/MODEL[@REVISION][:FILE]`` on the Hub.
        precision: of the computation; bfloat16 is faster on GPUs.
        config_file: the config that it was trained with; required only if that file defines or
            imports the model.

    Raises:
        InputError: nothing is at ``source``, or another version wrote it.
        RunAgain: the Hub cannot be reached now.
    """

    def __init__(
        self,
        source: str | Path,
        precision: Precision = "float32",
        config_file: str | Path | None = None,
    ) -> None:
        if config_file is not None:
            config.named(str(config_file))
        source = hub.local(source)
        weights.check_there(source)
        self._source, self._precision = source, precision
        self._described = weights.model_at(source)  # None for a weights file

    def __repr__(self) -> str:
        """Where the model is, and of which kind if the source is not a weights file."""
        kind = "" if self._described is None else f": {from_file.name_of(self._described)}"
        return f"Model({str(self._source)!r}{kind})"

    @cached_property
    def _causal(self) -> CausalModel:
        return CausalModel(self._source, self._precision)

    @cached_property
    def _masked(self) -> MaskedModel:
        return MaskedModel(self._source, self._precision, command="fill_mask")

    @cached_property
    def _autoencoder(self) -> Autoencoder:
        return Autoencoder(self._source, self._precision, command="encode")

    @from_python()
    def generate(
        self,
        prompt: str,
        *,
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> str:
        """Completes a text, and returns prompt and completion.

        Args:
            prompt: the beginning; not empty.
            tokens: tokens to generate at most; the model may end the text earlier.
            temperature: below 1 favors likely tokens; 0 always takes the most likely one.
            top_k: sample from the K most likely tokens; None is all.
            top_p: sample from the smallest set of tokens that together have this probability.
            seed: random seed; the same seed gives the same text.

        Raises:
            InputError: not a causal language model, or a number out of its range.
        """
        model = self._causal
        choice = Choice(temperature=temperature, top_k=top_k, top_p=top_p)
        ids = model.ids(model.encode(prompt), tokens=tokens, choice=choice, seed=seed)
        return prompt + "".join(grown[0] for grown in model.texts(ids))

    @from_python()
    def fill_mask(self, text: str, top: int = 5) -> list[list[Guess]]:
        """Predicts the most likely tokens for each ``[MASK]`` of a text, best first.

        Args:
            text: with at least one ``[MASK]``.
            top: tokens per mask.

        Raises:
            InputError: not a masked language model, or no mask in the text.
        """
        return self._masked.fill(text, top)

    @from_python()
    def encode(self, video: str | Path | np.ndarray) -> np.ndarray:
        """Encodes a video of any length.

        With k frames per latent (``model.time_downscale``; usually 4), T frames become
        L = ceil((T - 1) / k) + 1 latents, enough to decode all of them: 12 frames become 4 latents.

        Args:
            video: a file, or uint8 [T, H, W, 3]. Sides that are not multiples of the model's factor
                are padded by repeating the last row and column.

        Returns:
            Latents, float32 [L, h, w, C]. With ``model.trim="h3"``, L is 5 n - 3.

        Raises:
            InputError: not a video autoencoder, or the video cannot be read.
        """
        model = self._autoencoder
        return np.stack(list(fetched(model.encoded(_frames(video)))))

    @from_python()
    def decode(
        self, latents: np.ndarray, *, height: int | None = None, width: int | None = None
    ) -> np.ndarray:
        """Decodes latents to a video, which may be up to k - 1 frames longer than the encoded one.

        Args:
            latents: [L, h, w, C], of a complete video.
            height, width: of a frame without padding; None takes all of the decoded frame.

        Returns:
            uint8 [k (L - 1) + 1, H, W, 3], see :meth:`encode`: 4 latents become 13 frames, of which
            the first T are those of a video of T frames.

        Raises:
            InputError: not a video autoencoder.
        """
        model = self._autoencoder
        factor = model.model.space_factor
        if latents.ndim != 4 or latents.shape[-1] != model.model.latent_channels:
            raise InputError(
                f"latents have shape {list(latents.shape)}: pass [L, h, w, C] with "
                f"C={model.model.latent_channels}"
            )
        count, h, w, _ = latents.shape
        frames = model.decoded(
            latents, height=height or h * factor, width=width or w * factor, count=count
        )
        return np.stack(list(frames))

    @from_python()
    def evaluate(
        self,
        data: str | Path,
        *,
        max_tokens: int | None = None,
        max_examples: int | None = None,
        text_field: str | None = None,
    ) -> Any:
        """Measures a language model on a text file or on BLiMP, or a causal one on CORE.

        Args:
            data: a UTF-8 text file, which is one document, a .jsonl or .parquet file, or the folder
                with the tasks of CORE or the pairs of BLiMP.
            text_field: the field or column with the text; None uses a usual name.
            max_tokens: of a text, measure only the first N tokens; None is all.
            max_examples: of each task or paradigm, measure only N examples; None is all.

        Returns:
            A score with ``loss``, ``accuracy``, and ``bits_per_byte`` or ``pseudo_perplexity``; for
            CORE, one with ``core`` and ``tasks``; for BLiMP, one with ``accuracy``, ``fields``, and
            ``paradigms``.

        Raises:
            InputError: not a language model (``jaxtrain evaluate`` compares autoencoders), or the
                file has no token.
        """
        described = self._described
        if described is None:
            raise InputError(
                f"{self._source} does not describe a language model: pass a checkpoint or a run "
                f"directory"
            )
        kind = language_models.KINDS.get(described.task)
        if kind is None:
            raise load.cannot(described, "evaluate", *language_models.KINDS, source=self._source)
        measurement = language_models.measurement(
            kind,
            Path(data).expanduser(),
            text_field=text_field,
            max_tokens=max_tokens,
            max_examples=max_examples,
        )
        model = self._causal if kind is CausalModel else self._masked
        return measurement.score(model, language_models.ROWS, lambda done, count: None)


def _frames(video: str | Path | np.ndarray) -> Iterable[np.ndarray]:
    if isinstance(video, np.ndarray):
        if video.dtype != np.uint8 or video.ndim != 4 or video.shape[-1] != 3 or not len(video):
            raise InputError(
                f"video has dtype {video.dtype} and shape {list(video.shape)}: pass uint8 "
                "[T, H, W, 3]"
            )
        return video
    from jaxtrain.inference.video.reading import Video

    return (image.pixels for image in Video(Path(video).expanduser()).images())
