"""The model contract.

There is no base class and no registry: a model is a module in this package, and importing it is its
registration. A model knows no mesh, no optimizer and no loop. It offers two classes: a ``Config``,
and the module that the config builds. A file names a model after its module here, such as ``gpt``.

``Config``: a frozen, keyword-only dataclass beside the module that it builds. It raises
``InputError`` when it is made with values that do not fit each other, or that no machine can build:
a file of a stranger may hold any (:mod:`jaxtrain.models.from_file`).

- ``build(rngs: nnx.Rngs) -> nnx.Module``: float32 parameters, freshly drawn. Must work under
  ``jax.eval_shape``.
- ``batch_spec(batch_size) -> dict[str, jax.ShapeDtypeStruct]``: exactly the arrays of a batch. The
  leading dimension of each is the batch. ``"weight"``, float32 [B], is always there: 1 for an
  example, 0 for a row that only fills a ragged batch.
- ``flops_per_example() -> float``: floating-point operations of forward and backward pass for one
  example, with the formula in its docstring. It counts what the model needs: no recomputation.
- ``tokens_per_example() -> int | None``: tokens of one example; None where that means nothing.
- ``tiny() -> Config``, a class method: the same model, small enough for a test on a CPU.
- ``init_from``, a field: None, or where a new run takes its parameters from.

The module that ``build`` returns:

- ``loss(batch, keys_B) -> (sum, weight, {name: (sum, weight)})``: differentiable; what an update
  is made of. ``keys_B`` holds a typed ``jax.random`` key for each row, which is the only source of
  chance, and of that row alone: a run that resumes with other microbatches or devices draws the
  same numbers.
- ``evaluate(batch) -> {name: (sum, weight)}``: no chance, no augmentation. A third entry, the sum
  of squares, asks for ``NAME_std`` beside ``NAME``. ``"loss"`` is always among the names.

Sums are float32 scalars over the whole batch given, rows weighted by ``batch["weight"]``; whoever
calls divides, once, after all microbatches and devices. So the sums of two halves of a batch add up
to the sums of the batch. Names come without ``train/`` and ``val/``.

Optional members. They alone decide what a model can do: nothing outside this package looks at its
class, and a command that needs a member refuses a model without it, and names the models that have
it (:mod:`jaxtrain.inference.load`).

=======================  =======  =================================================================
member                   of       what it is for
=======================  =======  =================================================================
``formulas``             Config   lines at the start of a run
``problems``             Config   refusing a run before it starts
``optimizer_groups``     Config   parameters with an optimizer of their own; ``optim.muon``
``frozen``               Config   state from files, such as the weights of a loss
``index_limits``         Config   made-up batches for measuring
``usage``                Config   the command for a trained model, at the end of a run
``bare``                 Config   loading a trained model without what only training needs
``latent_shape``         Config   ``prepare latents``
``teacher``, a field     Config   latents in video batches, for a loss that is not None
``remat``, a field       Config   ``plan --fit`` and ``bench sweep``, which try its other values
``to_weights``           Config   ``export``; with ``from_weights``, ``guess``, ``not_in_weights``
``to_settings``          Config   folders of transformers; with ``from_settings``, ``model_type``
``derived``              module   metrics that follow from others, such as perplexity
``samples``              module   images and texts while training
``decode_step``            module   ``generate``, ``evaluate`` on a text; with ``cache``
``logits_at``            module   ``fill``, ``evaluate`` on a text
``decode``               module   ``encode``, ``decode``, ``reconstruct``, ``evaluate`` on videos
=======================  =======  =================================================================

Of the config:

- ``formulas() -> [line]``: what the config derives from its fields, each number with its formula.
- ``problems() -> [message]``: what keeps the config from being trained on this machine, such as
  files that are not there. Cheap: it opens nothing.
- ``optimizer_groups() -> {name: Group or Role}`` (:mod:`jaxtrain.config.param_groups`): parameters
  with an optimizer and a clip of their own, such as a discriminator's; and what ``optim.muon`` does
  with the others.
- ``frozen() -> {dotted path: array}``: values of state that is no parameter and comes from files.
  Read when a new run starts.
- ``index_limits() -> {name: count}``: for arrays of a batch that hold indices, how many values
  there are. Batches made up for measuring stay below.
- ``usage``: the command that uses a trained model; ``{run}`` in it is the run's directory.
- ``bare() -> Config``: the same network without what only training needs.
- ``latent_shape``: of one example's latents, [L, h, w, C].
- ``to_weights(params) -> {name: array}`` and ``from_weights(tensors, source) -> params``: the
  parameters under the names of the program that the model comes from, and the way back, which
  raises ``InputError`` for every array that is missing, extra or misshapen. With them
  ``guess(tensors, source) -> Config``, a class method: what such a file asks for; and
  ``not_in_weights``, pairs (field, attribute that holds what it comes to) of what no array's shape
  tells: a run starts and resumes only from parameters trained with the same.
- ``to_settings() -> dict`` and ``from_settings(dict, source) -> Config``, a class method: the
  config.json of transformers (:mod:`jaxtrain.interop.huggingface`), and the way back; with them
  ``model_type``, what such a file calls the model. Where transformers has other names than
  ``to_weights``: ``to_transformers(params)``; ``from_weights`` takes both.

Of the module:

- ``derived(means) -> {name: value}``, static: what follows from the means of ``evaluate`` over all
  examples, as a perplexity.
- ``samples(batch) -> {name: sample}``: uint8 [H, W, 3] for a picture, [T, H, W, 3] for a clip,
  int32 [R, T] for R texts as ids of tokens: those that were given, a -1, and those that the model
  has written. Which text the ids stand for is known to the data
  (:class:`jaxtrain.data.source.Sources`), not to the model.
- ``cache(rows, length) -> cache`` and ``decode_step(tokens_BS, count, cache, start) -> (logits_BV,
  cache)``: what writes texts (:mod:`jaxtrain.ops.generation`). A cache is a tree of arrays that
  keeps what later positions need of earlier ones, in the dtype of the parameters. ``decode_step``
  takes the tokens of the positions from ``start`` on, all of which fit into the cache, and gives
  the float32 logits of the word after the first ``count`` of them; ``count`` and ``start`` are
  int32 scalars. Those behind only fill the array up: they change nothing, and the next call, with
  ``start + count``, replaces them. The logits are those of the whole sequence at once, to rounding.
- ``logits_at(tokens_BS, positions_BM) -> logits_BMV``: float32, of the words at these positions,
  each from all tokens around it.
- ``encode(video_BTHW3) -> latents_BLHWC`` and ``decode``, the way back, for videos.

Parameters arrive in the dtype of the computation (bfloat16 or float32): a module computes in the
dtype that it finds, and in float32 for losses, softmax, statistics of norms, and metrics.

A parameter is read as ``self.kernel[...]`` where it is used, inside a block that is called through
``jaxtrain.ops.layers.remat``, and handed as it is to the operation that uses it: then a sharded
parameter is gathered there, in the forward and again in the backward pass.

No random key or ``nnx.Rngs`` may stay in the module. State that is no parameter (batch norm,
replay) is an NNX variable of a type of its own.
"""
