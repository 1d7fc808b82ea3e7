"""A small video autoencoder: TAEHV's networks, trained to reconstruct clips.

Reading order: :class:`Config`, :class:`VideoAutoencoder`, then `network.py` and `blocks.py`.
`timing.py` says which frame belongs to which latent, `streaming.py` runs videos of any length,
`weights.py` reads and writes the reference's names. `augment.py` changes training clips on the
device, `quality.py` measures reconstructions.

Shapes: B clips, T frames, H height, W width, 3 colours; P side of a patch.
"""

from jaxtrain.models.video_ae.autoencoder import VideoAutoencoder
from jaxtrain.models.video_ae.config import Config
from jaxtrain.models.video_ae.losses import Adversary, Perceptual, Teacher

__all__ = ["Adversary", "Config", "Perceptual", "Teacher", "VideoAutoencoder"]
