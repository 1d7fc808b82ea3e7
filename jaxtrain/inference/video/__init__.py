"""Uses models of videos: reads and writes complete videos, encodes and decodes them.

`reading.py` and `writing.py` process complete files, which must be intact; training reads clips
(:mod:`jaxtrain.data.video`). `autoencoder.py` encodes and decodes, `latent_files.py` stores latents
(`tensor_stream.py`), and `folder.py` does so for many files.
"""
