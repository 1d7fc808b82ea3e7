"""The contract of a model: the base classes of its config and of its module.

A model is a module in :mod:`jaxtrain.models` with a ``Config``: a frozen, keyword-only dataclass
that derives from :class:`ModelConfig`, and whose ``build`` returns a :class:`Model`. The rest of
the package calls only the methods of these two classes, and never checks a model's class.

- Required: ``build``, ``batch_spec`` and ``tiny`` of the config; ``loss`` and ``evaluate`` of the
  module.
- With ``task``, what its commands call: see there.
- ``weight_tables`` enables the commands ``export`` and ``import``; ``model_type`` or
  ``diffusers_class``, with ``to_settings`` and ``from_settings``, also for folders of transformers
  or diffusers.
- All else has a default.


The batch and the data
----------------------

The section ``data`` of a config determines the arrays of a batch. ``batch_spec`` must list exactly
these, with the batch size B as the first dimension of each:

Any data:

- ``weight``: float32 [B], 1 for an example, 0 for a row that only fills up an incomplete batch.

``jaxtrain.data.text.config.Causal``:

- ``tokens``: int32 [B, S], token ids;
- ``targets``: int32 [B, S], the next token of each token; -1 is not predicted;
- ``target_bytes``: int32 [B, S], UTF-8 bytes that each target stands for; 0 for a special token.

``jaxtrain.data.text.config.Masked``:

- ``tokens``: int32 [B, S], token ids after masking;
- ``positions``: int32 [B, M], positions to predict, ascending;
- ``targets``: int32 [B, M], the original ids at these positions;
- ``target_weights``: float32 [B, M], 1 for a target, 0 for an unused slot;
- ``segments``, only if ``model.attend`` is "document": int32 [B, S], number of each token's
  document within the sequence, from 1; 0 for padding.

``jaxtrain.data.video.config.Config``:

- ``video``: uint8 [B, T, H, W, 3], RGB frames;
- ``latents``: float32 [B, L, h, w, C], a teacher's latents, if ``batch_spec`` lists them.

The workers may make a training batch in another form that costs them less, such as YUV planes in
place of RGB frames: ``data.sent(spec, model)`` returns its arrays, and the step calls
``data.received(batch, model)`` before the model sees it.

Data sets read their sizes from the model's config, so it needs these attributes:

- all text: ``sequence_length`` (S, tokens per example), ``vocab_size`` (ids, special tokens
  included; a tokenizer is trained for this many) and ``init_from``;
- masked text also: ``mask_fraction`` (M is ``mask_fraction * S``, rounded to nearest, halves up),
  ``pad_id`` and ``attend``;
- video: ``frames``, ``height`` and ``width`` (T, H and W). With ``data.crop``, training uses a copy
  of the config with a smaller ``height`` and ``width``, and the same parameters.


Numerics
--------

Parameters arrive in the dtype of the computation (bfloat16 or float32). A module computes in that
dtype, and in float32 for losses, softmax, norm statistics and metrics.

Read a parameter as ``self.kernel[...]`` where it is used, inside a block that is called through
``jaxtrain.ops.layers.remat``, and pass it unchanged to the operation that uses it. A sharded
parameter is then gathered there, in the forward and again in the backward pass.

The module must not store a random key or ``nnx.Rngs``. Non-parameter state (batch norm, replay) is
an NNX variable of a type of its own.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import jax
import numpy as np
from flax import nnx

from jaxtrain.config import bounds, param_groups
from jaxtrain.config.metrics import Metric
from jaxtrain.errors import InputError
from jaxtrain.models import weight_table
from jaxtrain.models.weight_table import Tensors, WeightTable
from jaxtrain.ops.chunked_loss import Batch, Predictions, Sums

Task = Literal["generate", "fill", "reconstruct"]


class ModelConfig(bounds.Section):
    """The config of a model.

    A field's bounds are its type (:mod:`jaxtrain.config.bounds`), and ``check`` compares fields,
    because a downloaded file may contain any values. This class is not a dataclass: what it calls
    a field is the default until a ``Config`` declares it again.
    """

    section = "model"

    init_from: str | None = None
    """A field: the source of a new run's initial parameters."""
    freeze: tuple[str, ...] = ()
    """A field of models that support it: parts or dotted paths. Parameters below them have no
    gradient and no optimizer state, and are replicated, so that they are never communicated."""
    remat: str | None = None
    """A field of models that support it: what the backward pass recomputes, a ``Literal`` with
    "none" among its values. ``plan --fit`` tries the other ones."""

    task: ClassVar[Task | None] = None
    """What a trained model is for, and so which methods its module has: generate text (``cache``,
    ``decode_step``, ``predict``), fill masks (``logits_at``), or reconstruct videos (``encode``,
    ``decode``)."""
    usage: ClassVar[str] = ""
    """The command that uses a trained model; ``{run}`` in it stands for the run directory,
    ``{input}`` for an input file, and ``{out}`` for the folder of its output, with a slash."""
    model_type: ClassVar[str | None] = None
    """The model's name in the config.json of transformers; None if it has no such model."""
    diffusers_class: ClassVar[str | None] = None
    """The model's class in the config.json of diffusers; None if it has no such model."""
    gpu_options: ClassVar[Mapping[str, str | bool]] = MappingProxyType({})
    """XLA's options for a training step on GPUs."""
    not_in_weights: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs (field, attribute with its effective value) that array shapes do not determine: a run
    starts and resumes only from parameters trained with the same values."""
    in_weights: ClassVar[tuple[str, ...]] = ()
    """Fields that determine array shapes, for the message about weights that do not fit."""

    def build(self, rngs: nnx.Rngs) -> "Model":
        """Builds the module, with new float32 parameters.

        Must work under ``jax.eval_shape``.
        """
        raise NotImplementedError

    def batch_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns all arrays of a batch."""
        raise NotImplementedError

    @classmethod
    def tiny(cls) -> Self:
        """Returns the same model, small enough for a test on a CPU.

        Commands ask it what a class can do before they know its sizes.
        """
        raise NotImplementedError

    def tokens_per_example(self) -> int | None:
        """Returns the number of tokens per example; None if an example has no tokens."""
        return None

    def index_limits(self) -> dict[str, int]:
        """Returns the number of valid values of each array of indices in a batch.

        Batches with others are refused. Synthetic batches, for measuring, stay below it.
        """
        return {}

    def may_change(self, field: str, theirs: Mapping[str, Any]) -> bool:
        """Returns whether a run may start from parameters trained with another value of a field.

        Args:
            field: one of `not_in_weights`.
            theirs: the known fields of the parameters' model.
        """
        del field, theirs
        return False

    def notes(self) -> list[str]:
        """Lists what follows from fields, such as sizes with formulas, for a run's first lines."""
        return []

    @property
    def largest_rate(self) -> float | None:
        """Returns the largest ``optim.peak_lr`` that suits the widths; a larger one is warned of.

        None if it is unknown, or if the rates follow from the width.
        """
        return None

    def problems(self) -> list[str]:
        """Returns why the config cannot be trained on this machine, such as missing files.

        Must be cheap and open no file.
        """
        return []

    def optimizer_groups(self) -> Mapping[str, param_groups.Group | param_groups.Role]:
        """Returns the parameters with their own optimizer and clipping, such as a discriminator's.

        Also how ``optim.muon`` treats the others.
        """
        return {}

    def file_weights(self) -> dict[str, np.ndarray]:
        """Reads the values of all variables of the type :class:`jaxtrain.ops.layers.FromFile`.

        They are read from files when a run starts or resumes. Checkpoints contain only their
        checksums, and a resumed run needs files with the same values.

        Returns:
            Dotted path -> array.
        """
        return {}

    def metrics(self) -> dict[str, Metric]:
        """Describes the metrics that are not in the table of :mod:`jaxtrain.config.metrics`."""
        return {}

    def bare(self) -> Self:
        """Returns the same network without its training-only parts."""
        return self

    @property
    def latent_shape(self) -> tuple[int, int, int, int] | None:
        """Returns the shape of one example's latents, [L, h, w, C]; None if it learns from none."""
        return None

    def weight_tables(self) -> tuple[WeightTable, ...]:
        """Returns the names of parameters elsewhere: the original's first, those of folders of
        transformers or diffusers last.

        () if there are none, so that the model has no ``export``.
        """
        return ()

    @property
    def in_transformers(self) -> bool:
        """Returns whether transformers has this network."""
        return self.model_type is not None

    @property
    def has_folder(self) -> bool:
        """Returns whether a folder for transformers or diffusers can be written."""
        return self.in_transformers or self.diffusers_class is not None

    @property
    def has_weights(self) -> bool:
        """Returns whether parameters can be converted."""
        return bool(self.weight_tables())

    def comfyui_name(self) -> str:
        """Returns the name by which ComfyUI finds the weights for previews, without a suffix.

        Raises:
            InputError: ComfyUI cannot load them.
        """
        raise InputError("--format comfyui is for the model video_ae: omit it")

    def export_note(self) -> str | None:
        """Explains why programs for the original's weights cannot load these; None if they can."""
        return None

    @property
    def export_usage(self) -> str:
        """Returns the command that exports the model, in the form of ``usage``; "" if none does."""
        if self.has_folder:
            library = "transformers" if self.in_transformers else "diffusers"
            return f"export {{run}} {{out}}{library} --format hf"
        return "export {run} {out}model.safetensors" if self.has_weights else ""

    def to_weights(self, params: Tensors) -> dict[str, np.ndarray]:
        """Converts parameters by dotted path to the original implementation's names and layout."""
        return self.weight_tables()[0].outward(params)

    def to_transformers(self, params: Tensors) -> dict[str, np.ndarray]:
        """Converts parameters by dotted path to the names and layout of such a library's folder."""
        return self.weight_tables()[-1].outward(params)

    def from_weights(self, tensors: Tensors, source: str) -> dict[str, np.ndarray]:
        """Converts arrays with the names of one of the tables to parameters by dotted path.

        Args:
            tensors: arrays by name.
            source: where they come from, for messages.

        Returns:
            Dotted path -> float32 array.

        Raises:
            InputError: lists the arrays that are missing, extra or misshapen.
        """
        bare = self.bare()
        expected = weight_table.shapes_of(lambda: bare.build(nnx.Rngs(0)))
        table = max(
            self.weight_tables(), key=lambda table: len(table.shapes(expected).keys() & tensors)
        )
        fields = [f"--{self.section}.{name}" for name in self.in_weights]
        cure = (
            f"Its shape is set by {', '.join(fields)}"
            if fields
            else "Use the config that it was trained with"
        )
        return table.inward(tensors, expected, source, cure)

    def slicer(self, theirs: Any, source: str) -> Any:
        """Returns a function that slices parameters of a wider model for this one, or None."""
        return None

    @classmethod
    def recognizes(cls, tensors: Tensors) -> bool:
        """Returns whether weights without a config are certainly of this model, by their names."""
        return False

    @classmethod
    def guess(cls, tensors: Tensors, source: str) -> Self:
        """Infers the config from weights that come without one.

        Raises:
            InputError: the arrays do not determine it, or are not of this model.
        """
        raise InputError(
            f"{source}: the sizes of the model do not follow from its {len(tensors)} arrays: pass "
            "a folder that has them together with their config.json"
        )

    @classmethod
    def ambiguity(cls, tensors: Tensors, source: str) -> str | None:
        """Explains that weights fit several configs; None if they fit one."""
        return None

    def to_settings(self) -> dict[str, Any]:
        """Returns the config.json of transformers or diffusers (jaxtrain.interop.huggingface)."""
        raise NotImplementedError

    @classmethod
    def from_settings(cls, content: Mapping[str, Any], source: str) -> Self:
        """Reads a config.json of transformers, or of diffusers.

        Raises:
            InputError: it describes another network.
        """
        raise NotImplementedError


class Model(nnx.Module):
    """The module of a model.

    Sums are float32 scalars over all examples of the batch, weighted by ``batch["weight"]``, so the
    sums of two halves of a batch add up to the sums of the batch. The caller divides once, after
    all microbatches and devices. Metric names have no ``train/`` or ``val/`` prefix.
    """

    def loss(self, batch: Batch, keys_B: jax.Array) -> tuple[jax.Array, jax.Array, Sums]:
        """Computes the training loss, which is differentiated, its weight, and metrics.

        Args:
            batch: the arrays of ``batch_spec``, and in a step ``step``: completed ones, uint32 [B].
            keys_B: one typed ``jax.random`` key per example. They are the only source of
                randomness, and each example uses its own key only, so that a run resumed with other
                microbatches or devices draws the same numbers.
        """
        raise NotImplementedError

    def evaluate(self, batch: Batch) -> Sums:
        """Computes the validation metrics, among them ``"loss"``.

        Without randomness and augmentation. With a third entry, each example's sum and weight,
        ``NAME_std`` is reported beside ``NAME``: the standard deviation over the means of groups of
        examples, such as videos.
        """
        raise NotImplementedError

    @staticmethod
    def derived(means: Mapping[str, float]) -> dict[str, float]:
        """Computes metrics from the means of ``evaluate`` over all examples, such as perplexity."""
        return {}

    def baseline_sums(self, batch: Batch) -> dict[str, jax.Array]:
        """Computes what :meth:`baseline` needs of a batch, as sums over its examples.

        Independent of the parameters. {} if no answer that ignores the input is worth a comparison.
        """
        return {}

    @staticmethod
    def baseline(sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns metrics of the best answer that ignores the input; a run that stays worse warns.

        Args:
            sums: of :meth:`baseline_sums` over all examples.
        """
        return {}

    def samples(self, batch: Batch) -> dict[str, jax.Array]:
        """Makes samples that are shown at each validation.

        Returns:
            Name -> uint8 [H, W, 3] for an image, [T, H, W, 3] for a clip, or int32 [R, T] for R
            texts as token ids: the prompt, a -1, and the generated tokens. The data decodes the ids
            (:class:`jaxtrain.data.source.Sources`).
        """
        return {}

    @staticmethod
    def sample_labels(batch: Mapping[str, Any]) -> dict[str, tuple[Sequence[str], Sequence[str]]]:
        """Returns labels of the rows and of the columns of the samples of a batch.

        Args:
            batch: the arrays, or their shapes.
        """
        return {}

    def cache(self, rows: int, length: int) -> Any:
        """Allocates a cache for ``length`` positions of ``rows`` sequences.

        A tree of arrays in the parameters' dtype, with what later positions need from earlier ones.
        """
        raise NotImplementedError

    def decode_step(
        self, tokens_BS: jax.Array, count: int | jax.Array, cache: Any, start: int | jax.Array
    ) -> tuple[jax.Array, Any]:
        """Computes the next token's logits (:mod:`jaxtrain.ops.generation`).

        Args:
            tokens_BS: tokens of the positions from ``start``, all of which must fit into the cache.
            count: how many of them count, int32 []. The others are filler: they change nothing, and
                the next call, with ``start + count``, replaces them.
            cache: what the positions before have left.
            start: the first position, int32 [].

        Returns:
            Float32 logits [B, V] of the token after the first ``count``, equal to those of one pass
            over the sequence, up to rounding; and the next cache.
        """
        raise NotImplementedError

    def predict(self, batch: Batch) -> Predictions:
        """Computes the cost of each target, and whether it is the most likely token."""
        raise NotImplementedError

    def logits_at(self, tokens_BS: jax.Array, positions_BM: jax.Array) -> jax.Array:
        """Computes float32 logits [B, M, V] at these positions, each from all tokens around it."""
        raise NotImplementedError

    def encode(self, video_BTHW3: jax.Array) -> jax.Array:
        """Maps videos in [0, 1] to latents [B, L, h, w, C]."""
        raise NotImplementedError

    def decode(self, latents_BLHWC: jax.Array) -> jax.Array:
        """Maps latents to videos."""
        raise NotImplementedError
