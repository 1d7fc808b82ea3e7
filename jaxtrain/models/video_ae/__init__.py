"""A small video autoencoder: TAEHV's networks, trained to reconstruct clips.

Reading order: :class:`Config`, :class:`VideoAutoencoder`, then `network.py` and `blocks.py`.
`timing.py` maps frames to latents, `streaming.py` processes videos of any length, `weights.py`
converts parameters to the reference's names and back, and `quality.py` measures reconstructions.

Shapes: B clips, T frames, H height, W width, 3 colors; P patch size.
"""

from jaxtrain.models.video_ae.autoencoder import VideoAutoencoder
from jaxtrain.models.video_ae.config import Config
from jaxtrain.models.video_ae.losses import Adversary, Perceptual, Teacher

__all__ = ["Adversary", "Config", "Perceptual", "Teacher", "VideoAutoencoder"]
