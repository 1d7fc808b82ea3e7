"""The models: one file or folder each. :mod:`jaxtrain.models.contract` is what all have in common.

There is no registry: a model's name is that of its module, such as ``gpt``. A model does not depend
on the mesh, the optimizer or the training loop. To add one, read the contract and one example:
docs/tutorials/add-a-model.md, or ``gpt.py``.
"""
