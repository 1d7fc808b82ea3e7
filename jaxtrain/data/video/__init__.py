"""Video: indexing, decoding, clips, preparation, writing; :class:`Config` in a config."""

from jaxtrain.data.video.config import Config

__all__ = ["Config"]
