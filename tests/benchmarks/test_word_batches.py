"""Random batches have the format that the models expect."""

import numpy as np
import word_batches

from jaxtrain.data.text.specials import NAMES
from jaxtrain.models import gpt, mlm


def test_masked_tokens_fit_the_model() -> None:
    model = mlm.Config.tiny()
    for batch in word_batches.masked(model, batch_size=3, count=2):
        spec = model.batch_spec(3)
        assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
            name: (one.shape, one.dtype) for name, one in spec.items()
        }
        assert (batch["targets"] >= len(NAMES)).all()
        assert (batch["targets"] < model.vocab_size).all()
        # A label tensor that is filled from all slots contains every target once.
        labels = np.zeros(batch["tokens"].shape, np.int32)
        np.put_along_axis(labels, batch["positions"], batch["targets"], axis=1)
        assert (labels > 0).sum() == batch["target_weights"].sum()


def test_next_tokens_fit_the_model() -> None:
    model = gpt.Config.tiny()
    for batch in word_batches.following(model, batch_size=3, count=2):
        spec = model.batch_spec(3)
        assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
            name: (one.shape, one.dtype) for name, one in spec.items()
        }
        np.testing.assert_array_equal(batch["targets"][:, :-1], batch["tokens"][:, 1:])
        assert 0 <= batch["tokens"].min() <= batch["targets"].max() < model.vocab_size
