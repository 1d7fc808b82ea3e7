"""Video data sets for training: one reader, sets of pieces, and clips."""

from jaxtrain.data.video.config import Config

__all__ = ["Config"]
