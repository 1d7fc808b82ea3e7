"""Tests masked language models: attention masks, losses, and BERT in plain NumPy."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models.small_masked import batch, stirred
from training import toy

from jaxtrain import config
from jaxtrain.errors import InputError
from jaxtrain.models import masked, mlm, modern_bert
from jaxtrain.ops import attention, output_layer, per_device
from jaxtrain.ops.layers import cross_entropy, gelu
from jaxtrain.training import state, state_size

TINY = mlm.Config.tiny()
MODELS: dict[str, Any] = {
    "bert": TINY,
    "modern_bert": dataclasses.replace(modern_bert.Config.tiny(), mask_fraction=TINY.mask_fraction),
}
KEYS = jax.random.split(jax.random.key(7), 4)  # one per example of batch()


@pytest.fixture(scope="module")
def bert() -> tuple[Any, Any]:
    return stirred(TINY)


@pytest.fixture(scope="module", params=MODELS)
def graph_and_params(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """The graph and the parameters of each model."""
    return stirred(MODELS[request.param])


@pytest.fixture(scope="module")
def evaluate(graph_and_params: tuple[Any, Any]) -> Any:
    graph, params = graph_and_params
    run = jax.jit(lambda p, b: nnx.merge(graph, p).evaluate(b))
    return lambda b: run(params, b)


@pytest.fixture(scope="module")
def encode(graph_and_params: tuple[Any, Any]) -> Any:
    graph, params = graph_and_params
    run = jax.jit(lambda p, tokens: nnx.merge(graph, p).hidden_states(tokens))
    return lambda tokens: run(params, tokens)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("mlm_h200_8", 12_875_432),
        ("bert_base_h200_8", 109_514_298 - 2 * 768),  # transformers' count includes token types
        ("bert_large_h200_8", 335_174_458 - 2 * 1024),
    ],
)
def test_the_parameter_count(name: str, count: int) -> None:
    model = config.named(name).model
    assert state_size.parameter_count(state.ModelDefinition(model.build).params) == count


def test_a_fraction_of_the_sequence_is_predicted() -> None:
    model = dataclasses.replace(TINY, sequence_length=256)
    assert model.batch_spec(2)["positions"].shape == (2, 38)  # 0.15 x 256 = 38.4


def test_padding_changes_no_other_position(encode: Any) -> None:
    """A sequence gives the same vectors with and without padding."""
    tokens = batch(1)["tokens"].at[0, 11:].set(0)
    np.testing.assert_allclose(encode(tokens)[:, :11], encode(tokens[:, :11]), atol=1e-5)


def test_a_sequence_of_only_padding_stays_finite(evaluate: Any) -> None:
    nothing = jnp.zeros((1, TINY.sequence_length), jnp.int32)
    empty = batch(1) | {"tokens": nothing, "segments": nothing}
    assert all(np.isfinite(leaf) for leaf in jax.tree.leaves(evaluate(empty)))


# BERT in float64 NumPy with the names of transformers' `BertForMaskedLM`: an independent check of
# the mathematics and of the parameter mapping.


def bert_state_dict(module: mlm.MaskedLanguageModel) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}

    def dense(name: str, kernel: np.ndarray, bias: np.ndarray) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = kernel.T, bias

    def norm(name: str, layer: masked.LayerNorm) -> None:
        found[f"{name}.weight"] = np.asarray(layer.scale[...], np.float64)
        found[f"{name}.bias"] = np.asarray(layer.bias[...], np.float64)

    def kernel_and_bias(layer: mlm.Dense) -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(layer.kernel[...], np.float64), np.asarray(layer.bias[...], np.float64)

    prefix = "bert.embeddings"
    word = np.asarray(module.embeddings.word[...], np.float64)
    found[f"{prefix}.word_embeddings.weight"] = word
    position = np.asarray(module.embeddings.position[...], np.float64)
    found[f"{prefix}.position_embeddings.weight"] = position
    found[f"{prefix}.token_type_embeddings.weight"] = np.zeros((1, word.shape[1]))
    norm(f"{prefix}.LayerNorm", module.embeddings.norm)
    for number, layer in enumerate(module.layers):
        prefix = f"bert.encoder.layer.{number}"
        kernels, biases = (np.split(part, 3, axis=-1) for part in kernel_and_bias(layer.qkv))
        for name, kernel, bias in zip(("query", "key", "value"), kernels, biases, strict=True):
            dense(f"{prefix}.attention.self.{name}", kernel, bias)
        dense(f"{prefix}.attention.output.dense", *kernel_and_bias(layer.attention_out))
        norm(f"{prefix}.attention.output.LayerNorm", layer.attention_norm)
        dense(f"{prefix}.intermediate.dense", *kernel_and_bias(layer.ff_in))
        dense(f"{prefix}.output.dense", *kernel_and_bias(layer.ff_out))
        norm(f"{prefix}.output.LayerNorm", layer.ff_norm)
    dense("cls.predictions.transform.dense", *kernel_and_bias(module.head.dense))
    norm("cls.predictions.transform.LayerNorm", module.head.norm)
    found["cls.predictions.bias"] = np.asarray(module.head.bias[...], np.float64)
    return found


def bert_logits(values: dict[str, np.ndarray], tokens: np.ndarray, heads: int) -> np.ndarray:
    """Computes the logits [S, V] of one sequence [S]."""
    erf = np.vectorize(math.erf)

    def dense(name: str, x: np.ndarray) -> np.ndarray:
        return x @ values[f"{name}.weight"].T + values[f"{name}.bias"]

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * values[f"{name}.weight"] + values[f"{name}.bias"]

    def gelu(x: np.ndarray) -> np.ndarray:
        return 0.5 * x * (1 + erf(x / math.sqrt(2)))

    prefix = "bert.embeddings"
    x = values[f"{prefix}.word_embeddings.weight"][tokens]
    x = x + values[f"{prefix}.position_embeddings.weight"][: len(tokens)]
    x = norm(f"{prefix}.LayerNorm", x + values[f"{prefix}.token_type_embeddings.weight"][0])
    for number in range(sum(name.endswith("query.weight") for name in values)):
        prefix = f"bert.encoder.layer.{number}"
        q, k, v = (dense(f"{prefix}.attention.self.{n}", x) for n in ("query", "key", "value"))
        joined = []
        for part in np.split(np.arange(x.shape[1]), heads):
            scores = q[:, part] @ k[:, part].T / math.sqrt(len(part))
            scores = np.exp(np.where(tokens != 0, scores, -np.inf))
            joined.append(scores / scores.sum(-1, keepdims=True) @ v[:, part])
        x = x + dense(f"{prefix}.attention.output.dense", np.concatenate(joined, -1))
        x = norm(f"{prefix}.attention.output.LayerNorm", x)
        h = dense(f"{prefix}.output.dense", gelu(dense(f"{prefix}.intermediate.dense", x)))
        x = norm(f"{prefix}.output.LayerNorm", x + h)
    prefix = "cls.predictions"
    h = norm(f"{prefix}.transform.LayerNorm", gelu(dense(f"{prefix}.transform.dense", x)))
    decoder = values["bert.embeddings.word_embeddings.weight"]
    return h @ decoder.T + values[f"{prefix}.bias"]


def test_the_numbers_match_bert(bert: tuple[Any, Any]) -> None:
    module, whole = nnx.merge(*bert), batch()
    values = bert_state_dict(module)
    logits = jax.jit(lambda p, *b: nnx.merge(bert[0], p).logits_at(*b))
    found = np.asarray(logits(bert[1], whole["tokens"], whole["positions"]))
    assert found.shape == (4, TINY.predicted, TINY.vocab_size)
    cost, right = 0.0, 0.0
    for row in range(4):
        want = bert_logits(values, np.asarray(whole["tokens"][row]), TINY.heads)
        want = want[np.asarray(whole["positions"][row])]
        np.testing.assert_allclose(found[row], want, atol=1e-4)
        used = slice(0, -1)  # the last slot of each example is unused
        targets = np.asarray(whole["targets"][row])[used]
        chances = np.exp(want[used]) / np.exp(want[used]).sum(-1, keepdims=True)
        cost -= np.log(chances[np.arange(len(targets)), targets]).sum()
        right += (want[used].argmax(-1) == targets).sum()
    sums = module.evaluate(whole)
    assert sums["loss"][0] == pytest.approx(cost, rel=1e-4)
    assert sums["accuracy"][0] == right
    assert sums["loss"][1] == sums["accuracy"][1] == 4 * (TINY.predicted - 1)


@pytest.mark.parametrize("words", [50, 64])
def test_the_padded_output_layer_has_the_numbers_of_a_plain_one(words: int) -> None:
    norm = masked.LayerNorm(16, 1e-12)
    rng = np.random.default_rng(0)
    word, x, bias = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((words, 16), (2, 3, 16), (words,))
    )
    targets = jnp.asarray(rng.integers(0, words, (2, 3)), jnp.int32)

    def cost(word: Any, x: Any, bias: Any) -> Any:
        head = masked.Head(lambda x: x, norm, words)
        products = head(SimpleNamespace(word=word), None, x, "float32")
        assert products.shape == (2, 3, 64)
        costs, right = output_layer.costs(products, bias, targets)
        return (costs * (1 + targets)).sum(), (right, output_layer.logits(products, bias))

    def plain(word: Any, x: Any, bias: Any) -> Any:
        logits = jnp.einsum("bmd,vd->bmv", norm(gelu(x)), word) + bias[None, None]
        costs, right = cross_entropy(logits, targets)
        return (costs * (1 + targets)).sum(), (right, logits)

    found, wanted = (
        jax.value_and_grad(function, argnums=(0, 1, 2), has_aux=True)(word, x, bias)
        for function in (cost, plain)
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_only_training_rounds_the_logits(bert: tuple[Any, Any]) -> None:
    graph, params = bert
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)

    def dtypes(function: Any) -> set[str]:
        program = str(jax.make_jaxpr(lambda p: function(nnx.merge(graph, p)))(low))
        return {
            dtype
            for dtype in ("f32", "bf16")
            if f":{dtype}[4,{TINY.predicted},64] = dot" in program
        }

    assert dtypes(lambda module: module.loss(batch(), KEYS)[0]) == {"bf16"}
    assert dtypes(lambda module: module.evaluate(batch())["loss"][0]) == {"f32"}


def test_initial_values_match_bert() -> None:
    config = dataclasses.replace(TINY, hidden=64, vocab_size=500)
    values = bert_state_dict(config.build(nnx.Rngs(0)))
    for name, array in values.items():
        if "LayerNorm" in name or "token_type" in name:
            assert (array == ("LayerNorm.weight" in name)).all(), name
        elif array.ndim == 1:
            assert (array == 0).all(), name
        else:
            assert array.std() == pytest.approx(0.02, rel=0.1), name


def test_a_sequence_longer_than_the_position_table_is_refused(bert: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"17 tokens .* sequence_length=16"):
        nnx.merge(*bert).hidden_states(jnp.ones((1, 17), jnp.int32))


MODERN = modern_bert.Config.tiny()


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (TINY, {"heads": 3}, r"model.hidden=16 must be a multiple of model.heads=3: use 2 heads"),
        (
            MODERN,
            {"heads": 16},
            r"model.heads=16 must divide model.hidden=16 into an even",
        ),
        (MODERN, {"local_attention": 7}, r"model.local_attention=7 must be even, .* use 8"),
        (
            TINY,
            {"mask_fraction": 0.01},
            r"mask_fraction=0.01 of model.sequence_length=16 is less than one token",
        ),
    ],
)
def test_values_that_do_not_fit_are_refused(
    model: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(model, **changes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:attention with heads")  # of width 8, in float32
@pytest.mark.parametrize(
    ("model", "shard", "devices"),
    [
        pytest.param(
            dataclasses.replace(TINY, attention_dropout=0.1),
            "optimizer",
            8,
            marks=pytest.mark.long,
        ),
        (dataclasses.replace(TINY, attention_dropout=0.1, attend="document"), "params", 8),
        (MODELS["modern_bert"], "params", 4),
    ],
    ids=["bert", "bert, documents", "modern_bert"],
)
def test_several_gpus_match_a_cpu(model: Any, shard: str, devices: int) -> None:
    """The step as it is traced for GPUs, except attention; with dropout and padding."""
    whole = jax.tree.map(
        lambda array: np.tile(array, (4,) + (1,) * (array.ndim - 1)), batch(model=model)
    )
    if model.attend == "document":
        documents = 1 + np.arange(model.sequence_length) // 5
        whole["segments"] = np.where(whole["tokens"] == 0, 0, documents).astype(np.int32)
    alone = toy.stepper(model, shard=shard)
    with per_device.tracing(platform="cuda"):
        several = toy.stepper(model, fsdp=devices, shard=shard)
    for _ in range(3):
        wanted, found = alone(whole), several(whole)
        assert float(found["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-5)
        assert float(found["grad_norm"]) == pytest.approx(float(wanted["grad_norm"]), rel=1e-4)


# ---- ModernBERT -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [({}, 149_655_232), ({"hidden": 1024, "layers": 28, "heads": 16, "ff": 2624}, 395_881_664)],
)
def test_the_parameters_are_as_many_as_in_transformers(sizes: Any, wanted: int) -> None:
    """The base and the large model."""
    model = dataclasses.replace(config.named("ettin_150m_h100_8").model, **sizes)
    assert state_size.parameter_count(state.ModelDefinition(model.build).params) == wanted


def test_a_global_layer_sees_all_tokens_and_a_local_one_those_nearby() -> None:
    """The first layer is global, the second local."""
    model = dataclasses.replace(
        MODELS["modern_bert"], sequence_length=64, layers=3, local_attention=4
    )
    graph, params = stirred(model)
    tokens = jnp.asarray(np.random.default_rng(0).integers(5, 50, (1, 64)), jnp.int32)

    def layer(number: int, x_BSD: jax.Array) -> jax.Array:
        module = nnx.merge(graph, params)
        near = attention.near_blocks(jnp.ones((1, 64), jnp.int32), 2)
        visible = jnp.ones((1, 1, 64), bool) if model.is_global(number) else near
        angles = attention.rotary(64, 8, 100.0)
        return module.layers[number](x_BSD, *angles, visible, None)

    x_BSD = nnx.merge(graph, params).embeddings(None, tokens)
    for number, reached in ((0, 64), (1, 5)):
        moved = layer(number, x_BSD.at[0, 30].add(1.0)) - layer(number, x_BSD)
        seeing = np.flatnonzero(np.abs(moved[0]).max(-1) > 0)
        assert len(seeing) == reached
        assert reached == 64 or list(seeing) == [28, 29, 30, 31, 32]


def test_a_tiny_model_learns_a_batch() -> None:
    model = MODELS["modern_bert"]
    step = toy.stepper(model)
    whole = jax.tree.map(np.asarray, batch(16, model=model))
    losses = [step(whole)["loss"] for _ in range(30)]
    assert losses[0] == pytest.approx(np.log(model.vocab_size), rel=0.05)
    assert losses[-1] < 0.3 * losses[0]
