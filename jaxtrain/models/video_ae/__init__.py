"""A small video autoencoder: TAEHV's networks, trained to reconstruct clips.

Reading order: :class:`Config`, :class:`VideoAutoencoder`, then `network.py` and `blocks.py`.
`pairs.py` and `folding.py` make pairs of convolutions fast, and `weights.py` converts parameters to
the reference's names and back. Losses and metrics are those of :mod:`..reconstruction`.

Shapes: B clips, T frames, H height, W width, 3 colors; P patch size.
"""

from jaxtrain.models.reconstruction.losses import Adversary, Perceptual, Teacher
from jaxtrain.models.video_ae.autoencoder import Config, VideoAutoencoder

__all__ = ["Adversary", "Config", "Perceptual", "Teacher", "VideoAutoencoder"]
