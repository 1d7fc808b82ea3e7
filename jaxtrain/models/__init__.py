"""Defines the contract of a model: its required and its optional members.

There is no base class and no registry: a model is a module in this package, and its name is the
module's name, such as ``gpt``. A model does not depend on the mesh, the optimizer or the training
loop. It offers two classes: a ``Config``, and the module that the config builds. To add a model,
read this page and one example: docs/tutorials/add-a-model.md, or ``gpt.py``.

``Config`` is a frozen, keyword-only dataclass. It raises ``InputError`` for values that contradict
each other or that no machine can build, because a downloaded file may contain any values
(:mod:`jaxtrain.models.from_file`). It has:

- ``build(rngs: nnx.Rngs) -> nnx.Module``: returns the module with new float32 parameters. Must work
  under ``jax.eval_shape``.
- ``batch_spec(batch_size) -> dict[str, jax.ShapeDtypeStruct]``: returns the arrays of a batch,
  without exception; see below.
- ``flops_per_example() -> float``: returns the floating-point operations of the forward and
  backward pass for one example, without recomputation. Its docstring gives the formula.
- ``tokens_per_example() -> int | None``: returns the number of tokens per example, or None if an
  example has no tokens.
- ``tiny() -> Config``, a class method: returns the same model, small enough for a test on a CPU.
- ``init_from: str | None``, a field: the source of a new run's initial parameters.

The module that ``build`` returns has:

- ``loss(batch, keys_B) -> (sum, weight, {name: (sum, weight)})``: the training loss, which is
  differentiated, and metrics. ``keys_B`` has one typed ``jax.random`` key per example. It is the
  only source of randomness, and each example uses its own key only, so that a run resumed with
  other microbatches or devices draws the same numbers.
- ``evaluate(batch) -> {name: (sum, weight)}``: the validation metrics, among them ``"loss"``,
  without randomness and augmentation. With a third entry, the sum of squares, ``NAME_std`` is
  reported beside ``NAME``.

Sums are float32 scalars over all examples of the batch, weighted by ``batch["weight"]``, so the
sums of two halves of a batch add up to the sums of the batch. The caller divides once, after all
microbatches and devices. Metric names have no ``train/`` or ``val/`` prefix.


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
- ``augment``: float32 [B, 5], factors of brightness, contrast and saturation, hue shift in turns,
  blur sigma in pixels;
- ``latents``, only if ``model.teacher.prepared``: float32 [B, L, h, w, C], the teacher's latents.

The workers may make a training batch in another form that costs them less, such as YUV planes in
place of RGB frames: ``data.sent(spec, model)`` returns its arrays, and the step calls
``data.received(batch, model)`` before the model sees it.

Data sets read their sizes from the model's config, so it needs these attributes:

- all text: ``sequence_length`` (S, tokens per example), ``vocab_size`` (ids, special tokens
  included; a tokenizer is trained for this many) and ``init_from``;
- masked text also: ``mask_fraction`` (M is ``mask_fraction * S``, rounded to nearest, halves up),
  ``pad_id`` and ``attend``;
- video: ``frames``, ``height`` and ``width`` (T, H and W) and, if present, ``teacher``.


Optional members
----------------

A model's abilities follow from these alone. Nothing outside this package checks a model's class. A
command that needs a missing member refuses the model, and lists the models that have it
(:mod:`jaxtrain.inference.load`).

=======================  =======  =================================================================
member                   of       used for
=======================  =======  =================================================================
``formulas``             Config   lines at the start of a run
``problems``             Config   refusing a run before it starts
``optimizer_groups``     Config   parameters with an optimizer of their own; ``optim.muon``
``constants``            Config   state from files, such as the weights of a loss
``freeze``, a field      Config   parameters that are not trained
``index_limits``         Config   synthetic batches for measuring
``metrics``              Config   metrics that are not in :data:`jaxtrain.config.metrics.METRICS`
``usage``                Config   the command for a trained model, at the end of a run
``bare``                 Config   loading a trained model without its training-only parts
``latent_shape``         Config   ``prepare latents``
``teacher``, a field     Config   latents in video batches, if ``teacher.prepared``
``remat``, a field       Config   ``plan --fit``, which tries its other values
``to_weights``           Config   ``export``; with ``from_weights``, ``guess``, ``not_in_weights``
``to_settings``          Config   folders of transformers; with ``from_settings``, ``model_type``
``derived``              module   metrics computed from others, such as perplexity
``samples``              module   sample images and texts during training; ``sample_labels``
``decode_step``          module   ``generate``, ``evaluate`` on a text; with ``cache``
``logits_at``            module   ``fill``, ``evaluate`` on a text
``decode``               module   ``encode``, ``decode``, ``reconstruct``, ``evaluate`` on videos
=======================  =======  =================================================================

Of the config:

- ``formulas() -> [line]``: numbers that the config derives from its fields, with their formulas.
- ``problems() -> [message]``: why the config cannot be trained on this machine, such as missing
  files. Must be cheap and open no file.
- ``optimizer_groups() -> {name: Group or Role}`` (:mod:`jaxtrain.config.param_groups`): parameters
  with their own optimizer and clipping, such as a discriminator's, and how ``optim.muon`` treats
  the others.
- ``constants() -> {dotted path: array}``: values of all variables of the type
  :class:`jaxtrain.ops.layers.Frozen`, which are read from files when a run starts or resumes.
  Checkpoints contain only their checksums, and a resumed run needs files with the same values.
- ``freeze``: a tuple of parts or dotted paths; parameters below them have no gradient and no
  optimizer state, and are replicated, so that they are never communicated.
- ``index_limits() -> {name: count}``: for each array of indices in a batch, the number of valid
  values. Synthetic batches stay below it.
- ``metrics() -> {name: Metric}``: the metrics that are not in the table of
  :mod:`jaxtrain.config.metrics`: which direction is better, their titles and units.
- ``usage``: the command that uses a trained model; ``{run}`` in it stands for the run directory,
  ``{input}`` for an input file.
- ``bare() -> Config``: the same network without its training-only parts.
- ``latent_shape``: shape of one example's latents, [L, h, w, C].
- ``to_weights(params) -> {name: array}`` and ``from_weights(tensors, source) -> params``: convert
  parameters to the names and layout of the original implementation, and back. ``from_weights``
  raises ``InputError`` that lists every missing, extra or misshapen array. They require
  ``guess(tensors, source) -> Config``, a class method, which infers the config from such a file;
  optionally ``ambiguity(tensors, source) -> str | None``, a class method, which explains that such
  a file fits several configs; and ``not_in_weights``, pairs (field, attribute with its effective
  value) that array shapes do not determine: a run starts and resumes only from parameters trained
  with the same values.
- ``to_settings() -> dict`` and ``from_settings(dict, source) -> Config``, a class method: convert
  to the config.json of transformers (:mod:`jaxtrain.interop.huggingface`), and back. They require
  ``model_type``, the model's name in that file. If transformers uses other names than
  ``to_weights``: ``to_transformers(params)``; ``from_weights`` then reads both.

Of the module:

- ``derived(means) -> {name: value}``, static: metrics computed from the means of ``evaluate`` over
  all examples, such as a perplexity.
- ``samples(batch) -> {name: sample}``: uint8 [H, W, 3] for an image, [T, H, W, 3] for a clip, or
  int32 [R, T] for R texts as token ids: the prompt, a -1, and the generated tokens. The data
  decodes the ids (:class:`jaxtrain.data.source.Sources`).
- ``sample_labels(batch) -> {name: (rows, columns)}``, static: labels of the rows and of the columns
  of the images and clips that ``samples`` makes of a batch with these shapes. Without it, they have
  only a title.
- ``cache(rows, length) -> cache`` and ``decode_step(tokens_BS, count, cache, start) -> (logits_BV,
  cache)``: generate text (:mod:`jaxtrain.ops.generation`). A cache is a tree of arrays in the
  parameters' dtype, with what later positions need from earlier ones. ``decode_step`` takes the
  tokens of the positions from ``start``, all of which must fit into the cache, and returns the
  float32 logits of the token after the first ``count`` of them; ``count`` and ``start`` are int32
  scalars. The other tokens are filler: they change nothing, and the next call, with ``start +
  count``, replaces them. The logits equal those of one pass over the sequence, up to rounding.
- ``logits_at(tokens_BS, positions_BM) -> logits_BMV``: float32 logits at these positions, each from
  all tokens around it.
- ``encode(video_BTHW3) -> latents_BLHWC`` and ``decode``, its inverse, for videos.


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
