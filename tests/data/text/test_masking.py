import numpy as np
import pytest

from jaxtrain.data.text.masking import mask, masked_count
from jaxtrain.data.text.specials import CLS, MASK, PAD, SEP, UNK, Specials

VOCAB = 50
FIRST_ORDINARY = 5


def sequence(seed: int, length: int = 64) -> np.ndarray:
    """A sequence of documents with every kind of special token."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(FIRST_ORDINARY, VOCAB, length).astype(np.int32)
    tokens[rng.random(length) < 0.1] = UNK
    tokens[rng.random(length) < 0.1] = SEP
    end = int(rng.integers(3, length))
    tokens[0], tokens[end], tokens[end + 1 :] = CLS, SEP, PAD
    return tokens


def masked(tokens: np.ndarray, seed: int, fraction: float = 0.15, **kwargs: float) -> dict:
    shares = {"random_share": 0.1, "keep_share": 0.1, **kwargs}
    rng = np.random.default_rng(seed)
    return mask(
        tokens, rng, mask_fraction=fraction, vocab_size=VOCAB, specials=Specials(), **shares
    )


@pytest.mark.parametrize(
    ("candidates", "count"), [(0, 0), (3, 0), (4, 1), (10, 2), (100, 15), (254, 38), (256, 38)]
)
def test_masked_count_rounds_halves_up(candidates: int, count: int) -> None:
    assert masked_count(candidates, 0.15) == count


@pytest.mark.parametrize("fraction", [0.0, 0.15, 0.4, 1.0])
def test_masks_have_the_documented_properties(fraction: float) -> None:
    for seed in range(100):
        tokens = sequence(seed)
        got = masked(tokens, seed + 1000, fraction)
        slots = masked_count(len(tokens), fraction)
        count = masked_count(int((tokens >= FIRST_ORDINARY).sum()), fraction)
        used = got["target_weights"] == 1
        positions = got["positions"][:count]

        assert {k: (v.shape, v.dtype) for k, v in got.items()} == {
            "tokens": ((64,), np.dtype(np.int32)),
            "positions": ((slots,), np.dtype(np.int32)),
            "targets": ((slots,), np.dtype(np.int32)),
            "target_weights": ((slots,), np.dtype(np.float32)),
        }
        assert used.sum() == count
        assert used[:count].all()
        for name in ("positions", "targets", "target_weights"):
            assert not got[name][count:].any()
        assert (np.diff(positions) > 0).all()  # ascending, without duplicates
        assert (tokens[positions] >= FIRST_ORDINARY).all()  # no special token is chosen
        assert (got["targets"][:count] == tokens[positions]).all()
        rest = np.setdiff1d(np.arange(64), positions)
        assert (got["tokens"][rest] == tokens[rest]).all()
        put = got["tokens"][positions]
        assert ((put == MASK) | ((put >= FIRST_ORDINARY) & (put < VOCAB))).all()


def test_the_input_is_unchanged_and_equal_rngs_give_equal_masks() -> None:
    tokens = sequence(0)
    before = tokens.copy()
    one, two, other = masked(tokens, 1), masked(tokens, 1), masked(tokens, 2)
    assert (tokens == before).all()
    assert all((one[k] == two[k]).all() for k in one)
    assert (one["positions"] != other["positions"]).any()


def test_fractions_and_uniform_choice() -> None:
    tokens = np.full(20_000, 7, np.int32)
    got = masked(tokens, 0)
    put = got["tokens"][got["positions"]]
    assert len(put) == 3000
    # Four standard deviations; a random token equals the original once in 45.
    assert abs((put == MASK).mean() - 0.8) < 0.03
    assert abs((put == 7).mean() - 0.1 - 0.1 / 45) < 0.023
    random_ids = put[(put != MASK) & (put != 7)]
    assert set(random_ids) == set(range(FIRST_ORDINARY, VOCAB)) - {7}
    assert abs(got["positions"].mean() / 20_000 - 0.5) < 0.03


def test_nothing_to_mask() -> None:
    got = masked(np.array([CLS, UNK, SEP, PAD], np.int32), 0, 0.5)
    assert got["tokens"].tolist() == [CLS, UNK, SEP, PAD]
    assert got["target_weights"].tolist() == [0, 0]


def test_special_tokens_may_have_any_id() -> None:
    specials = Specials(pad=7, unk=3, cls=0, sep=49, mask=20, others=(30,))
    ordinary = set(range(VOCAB)) - {7, 3, 0, 49, 20, 30}
    tokens = np.arange(VOCAB, dtype=np.int32)
    drawn: set[int] = set()
    for seed in range(200):
        got = mask(
            tokens,
            np.random.default_rng(seed),
            mask_fraction=1.0,
            random_share=1.0,
            keep_share=0.0,
            vocab_size=VOCAB,
            specials=specials,
        )
        used = got["target_weights"] == 1
        assert set(got["targets"][used].tolist()) == ordinary
        drawn |= set(got["tokens"][got["positions"][used]].tolist())
    assert drawn == ordinary
