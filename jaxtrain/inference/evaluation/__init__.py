"""Measures the quality of models: of reconstructions, with intervals, and of language models.

`reconstructions.py` compares autoencoders on the clips that `evaluation_clips.py` chooses, or those
of a published protocol (`protocols.py`); `distillation.py` compares a student with its teacher.
`intervals.py` has the uncertainty over videos, `frechet.py` and `i3d.py` the Fréchet distance.
`language_models.py` measures on a text, on `core_tasks.py`, or on `blimp.py`.
"""
