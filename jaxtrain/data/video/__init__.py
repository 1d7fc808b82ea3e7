"""Video data sets: indexing, decoding, clips, preparation, and writing."""

from jaxtrain.data.video.config import Config

__all__ = ["Config"]
