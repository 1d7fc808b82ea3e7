"""The core of a run: from a config to its last checkpoint.

How a batch becomes a step, in the order of the data:

1. ``data/pipeline.py`` (:class:`~jaxtrain.data.pipeline.TrainingBatches`) yields global batches:
   worker processes read the examples in the order of ``data/sampler.py``, and a thread puts them
   on the devices.
2. ``loop.py`` takes a batch, calls the compiled step, records the metrics of the step before, and
   decides when to validate, save and stop.
3. ``step.py`` is that step: cast and gather the parameters, call ``module.loss`` of the model on
   each microbatch, reduce the gradients, update with optax, and skip a bad step.
4. ``state.py`` is what a step updates, and turns its arrays into the Flax module with ``loss``.

``setup.py`` makes all of these from a config, and compiles the step once. ``session.py`` is around
the loop: processes, signals, watchdog, and exit code. ``diagnosis/replay.py`` computes some steps
twice to check the devices, and ``checkpoint/uploader.py`` keeps a run in a bucket. Where arrays are
stored: ``sharding.py``.
"""
