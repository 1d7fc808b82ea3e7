"""Video data sets: one reader, sets of pieces, clips, and writing."""

from jaxtrain.data.video.config import Config

__all__ = ["Config"]
