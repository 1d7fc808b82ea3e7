"""Uses trained models: encode and decode videos, fill masks, generate text, measure quality.

`load.py` opens a model from a run, a checkpoint, or a file, as `model.py`, which the Python API
returns. `language_model.py` and `fill_mask.py` are for text, `video/` for videos, and
`evaluation/` measures both. `teachers.py` has the autoencoders of others, and `export_check.py`
reads back what was exported.
"""
