"""Tests Muon against NumPy and by singular values, on one device and on eight."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint.small_state import found_momentum
from training import toy

from jaxtrain import config
from jaxtrain.config import param_groups
from jaxtrain.cost.hlo import collectives
from jaxtrain.errors import InputError
from jaxtrain.models import gpt, llama, wan_vae
from jaxtrain.optim import build, muon
from jaxtrain.optim.schedule import GroupScalars, Schedule
from jaxtrain.sharding import ShardingRule
from jaxtrain.training import state

# Three square matrices, which no mesh divides evenly, and eight wide and tall ones.
SHAPES = {f"square{n}": (16, 16) for n in range(3)} | {
    f"flat{n}": (16, 64) if n % 3 else (64, 16) for n in range(8)
}
SETTINGS = config.Muon(momentum_steps=4)
MATRICES = param_groups.Role(prefix="", role="matrix")
ROLES = {
    "matrices": param_groups.Role(prefix="blocks.", role="matrix", scale=0.5),
    "wte": param_groups.Role(prefix="wte", role="embedding", scale=2.0),
    "head": param_groups.Role(prefix="head", role="unembedding"),
}


def optim_of(of_muon: config.Muon, **changes: object) -> config.Optim:
    base = config.Optim(peak_lr=1e-3, schedule="constant", warmup_steps=0, muon=of_muon)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def matrices(seed: int = 0) -> dict[str, np.ndarray]:
    """Returns matrices with singular values from 0.2 to 1; 0.01 would need over five iterations."""
    rng = np.random.default_rng(seed)

    def matrix(shape: tuple[int, int]) -> np.ndarray:
        u, values, v = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
        return np.float32(u * np.linspace(1, 0.2, len(values)) @ v)

    return {name: matrix(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
def test_singular_values_approach_one_and_singular_vectors_stay(scale: float) -> None:
    given = {name: scale * array for name, array in matrices().items()}
    for name, found in jax.jit(muon.orthogonal)(given).items():
        u, _, v = np.linalg.svd(given[name], full_matrices=False)
        among = u.T @ np.asarray(found, np.float64) @ v.T
        values = np.diagonal(among)
        assert values.min() > 0.5, name
        assert values.max() < 1.35, name
        assert np.abs(among - np.diag(values)).max() < 0.1, name


def test_zeros_stay_zeros() -> None:
    found = muon.orthogonal({"a": jnp.zeros((4, 8))})["a"]
    np.testing.assert_array_equal(found, jnp.zeros((4, 8)))


def test_a_matrix_does_not_depend_on_others_or_on_transposition() -> None:
    given = matrices()
    together = jax.jit(muon.orthogonal)(given)["flat1"]
    alone = muon.orthogonal({"one": given["flat1"]})["one"]
    turned = muon.orthogonal({"one": given["flat1"].T})["one"].T
    np.testing.assert_allclose(together, alone, atol=1e-5)
    np.testing.assert_array_equal(alone, turned)


def newton_schulz_by_hand(x: np.ndarray) -> np.ndarray:
    """Computes Muon in float64, of the transpose where that is wide, as the original does."""
    turned = x.shape[0] > x.shape[1]
    x = (x.T if turned else x).astype(np.float64)
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if turned else x


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.08)])
def test_three_steps_match_muon(precision: config.Precision, tolerance: float) -> None:
    """Includes momentum warmup, Nesterov, and the scale for kernels with more outputs."""
    transform = muon.muon(SETTINGS, "matrices", precision)
    update = jax.jit(transform.update)
    state, params = transform.init(matrices()), matrices()
    mean = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(3):
        grads = matrices(seed=step)
        beta = 0.85 + (0.95 - 0.85) * step / 4
        scalars = {"matrices": GroupScalars(0.02, 0.0, beta)}
        updates, state = update(grads, state, params, scalars=scalars)
        for name, grad in grads.items():
            mean[name] = beta * mean[name] + (1 - beta) * grad
            ahead = beta * mean[name] + (1 - beta) * grad
            inputs, outputs = grad.shape
            want = -0.02 * math.sqrt(max(1, outputs / inputs)) * newton_schulz_by_hand(ahead)
            error = np.linalg.norm(updates[name] - want) / np.linalg.norm(want)
            assert error < tolerance, (step, name)
            np.testing.assert_allclose(state.momentum[name], mean[name], atol=1e-6)


def test_momentum_falls_during_the_warm_down() -> None:
    momenta = config.Muon(momentum=0.97, momentum_steps=4, last_momentum=0.9)
    some = optim_of(momenta, schedule="trapezoid", warmdown_fraction=0.2)
    schedule = Schedule(some, 100, ROLES)
    found = [schedule.at(n)["matrices"].momentum for n in (0, 2, 4, 80, 90, 100)]
    assert found == pytest.approx([0.85, 0.91, 0.97, 0.97, 0.935, 0.9])


def test_momentum_does_not_jump_when_the_warm_down_begins_before_its_rise_ends() -> None:
    """As in the config demo_gpt."""
    momenta = config.Muon(momentum=0.97, momentum_steps=100, last_momentum=0.9)
    some = optim_of(momenta, schedule="trapezoid", warmdown_fraction=0.65)
    schedule = Schedule(some, 200, ROLES)
    found = np.array([schedule.at(n)["matrices"].momentum for n in range(201)])
    assert found[[0, 70, 71, 200]] == pytest.approx([0.85, 0.934, 0.9352, 0.9], abs=1e-6)
    assert np.abs(np.diff(found)).max() < 0.0013  # 0.12 / 100: the rise


def test_cautious_decay_applies_where_update_and_parameter_agree_and_ends_at_zero() -> None:
    cautious = dataclasses.replace(SETTINGS, cautious_decay=True)
    params, grads = matrices(1), matrices(2)
    found = {}
    transform = muon.muon(cautious, "matrices", "float32")
    for decay in (0.0, 0.5):
        schedule = Schedule(optim_of(cautious, weight_decay=decay), 4, {"matrices": MATRICES})
        states = transform.init(params)
        for step in range(3):
            found[decay, step], states = transform.update(
                grads, states, params, scalars=schedule.at(step)
            )
    for step, share in ((0, 1.0), (2, 0.5)):
        for name, plain in found[0.0, step].items():
            inputs, outputs = plain.shape
            scale = 0.02 * math.sqrt(max(1, outputs / inputs)) * 0.5 * share
            agrees = np.asarray(plain) * params[name] <= 0  # the update is subtracted
            want = plain - scale * agrees * params[name]
            np.testing.assert_allclose(found[0.5, step][name], want, atol=1e-6)


EVERYTHING = config.Muon(
    momentum_steps=4,
    equilibrate=True,
    polar_express=True,
    variance_b2=0.9,
    cautious_decay=True,
)
KERNELS = {"kernel": (3, 3, 8, 16), "wide": (3, 3, 2, 64), "third": (3, 3, 3, 8, 8)}


@pytest.mark.parametrize("layout", [(1, 1, "none"), (2, 4, "params")])
def test_a_kernel_is_the_matrix_of_its_taps_and_inputs_by_its_outputs(
    layout: tuple[int, int, str],
) -> None:
    data, fsdp, shard = layout
    settings = config.Mesh(data=data, fsdp=fsdp, shard=shard, min_shard_elements=1)  # type: ignore[arg-type]
    rule = ShardingRule(toy.mesh_of(data, fsdp), settings)
    rng = np.random.default_rng(0)
    given = [
        {name: np.float32(rng.standard_normal(shape)) for name, shape in KERNELS.items()}
        for _ in range(4)
    ]
    params, *grads = [
        {n: jax.device_put(a, rule(a)) for n, a in arrays.items()} for arrays in given
    ]
    kernels = muon.muon(EVERYTHING, "matrices", "float32", rule)
    matrices = muon.muon(EVERYTHING, "matrices", "float32")
    some = Schedule(optim_of(EVERYTHING, weight_decay=0.5), 4, {"matrices": MATRICES})
    state, by_matrix = kernels.init(params), matrices.init(flat(given[0]))
    update, update_matrix = jax.jit(kernels.update), jax.jit(matrices.update)
    for step in range(3):
        scalars = some.at(step)
        updates, state = update(grads[step], state, params, scalars=scalars)
        wanted, by_matrix = update_matrix(
            flat(given[step + 1]), by_matrix, flat(given[0]), scalars=scalars
        )
        for name, want in wanted.items():
            np.testing.assert_allclose(updates[name].reshape(want.shape), want, atol=2e-6)


def flat(kernels: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array.reshape(-1, array.shape[-1]) for name, array in kernels.items()}


# ---- sharded ----------------------------------------------------------------------------------


def spread(
    data: int, fsdp: int, shard: str, arrays: dict[str, np.ndarray] | None = None
) -> tuple[ShardingRule, jax.stages.Compiled, dict]:
    settings = config.Mesh(data=data, fsdp=fsdp, shard=shard, min_shard_elements=1)  # type: ignore[arg-type]
    rule = ShardingRule(toy.mesh_of(data, fsdp), settings)
    given = {n: jax.device_put(array, rule(array)) for n, array in (arrays or matrices()).items()}
    where = {name: rule(array) for name, array in given.items()}
    whole = jax.jit(lambda m: muon.orthogonal(m, rule), in_shardings=(where,), out_shardings=where)
    return rule, whole.lower(given).compile(), given


@pytest.mark.parametrize("layout", [(1, 8, "params"), (2, 4, "optimizer"), (8, 1, "none")])
def test_sharded_matrices_match_unsharded_ones(layout: tuple[int, int, str]) -> None:
    _, program, given = spread(*layout)
    found = program(given)
    for name, want in jax.jit(muon.orthogonal)(matrices()).items():
        assert found[name].sharding == given[name].sharding
        error = np.linalg.norm(found[name] - want) / np.linalg.norm(want)
        assert error < 1e-5, name


@pytest.mark.parametrize("layout", [(1, 8, "params"), (2, 4, "optimizer"), (8, 1, "none")])
def test_communication_volume_is_at_most_that_of_one_gather(layout: tuple[int, int, str]) -> None:
    rule, program, given = spread(*layout)
    found = collectives(program.as_text(), 8)
    sent = sum(one.times * one.wire_bytes for one in found)
    data, fsdp = rule.mesh.shape.values()
    whole = 4 * sum(array.size for array in given.values())
    assert 0 < sent <= whole * 7 / 8
    if data == 1:  # to complete matrices and back; the three square ones are padded to eight
        eight = 4 * 8 * (16 * 64 + 16 * 16)
        assert sent == 2 * eight / fsdp * (fsdp - 1) / fsdp


@pytest.mark.parametrize("shape", [(3, 3, 8, 16), (3, 3, 16, 8), (3, 3, 3, 16, 8), (1, 1, 8, 128)])
def test_shards_of_kernels_become_whole_matrices_without_a_gather(shape: tuple[int, ...]) -> None:
    """Each device sends its shards of seven of the eight kernels, and later seven results."""
    rng = np.random.default_rng(0)
    kernels = {f"{n}": np.float32(rng.standard_normal(shape)) for n in range(8)}
    _, program, given = spread(1, 8, "params", kernels)
    found = collectives(program.as_text(), 8)
    assert sum(one.times * one.wire_bytes for one in found) == 2 * 4 * math.prod(shape) * 7 / 8
    for name, array in program(given).items():
        assert array.sharding == given[name].sharding


# ---- with other parameters --------------------------------------------------------------------

PARAMS = {
    "wte": (32, 8),
    "blocks.0.q": (8, 8),
    "blocks.0.up": (8, 32),
    "blocks.0.norm": (8,),
    "head": (32, 8),
    "extra.kernel": (8, 8),
    "extra.bias": (8,),
}


def settings(**changes: object) -> config.Optim:
    return dataclasses.replace(optim_of(SETTINGS), **changes)  # type: ignore[arg-type]


def first_update(
    some: config.Optim, params: Any, grads: Any, groups: param_groups.Groups
) -> tuple[Any, Any]:
    optimizer = build.make_optimizer(some, params, groups)
    scalars = Schedule(some, 10, groups).at(0)
    return jax.jit(optimizer.update)(grads, optimizer.init(params), params, scalars=scalars)  # type: ignore[no-any-return]


def drawn(seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {n: jnp.asarray(rng.standard_normal(s), jnp.float32) for n, s in PARAMS.items()}


def test_each_parameter_has_one_optimizer_and_its_state() -> None:
    """Matrices have one buffer, all others two, whatever the names of the groups."""
    shapes = jax.eval_shape(drawn)
    state = jax.eval_shape(build.make_optimizer(settings(), shapes, ROLES).init, shapes)
    leaves = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.float32]
    of_muon = sum(math.prod(PARAMS[name]) for name in ("blocks.0.q", "blocks.0.up"))
    everything = sum(math.prod(shape) for shape in PARAMS.values())
    assert sum(leaf.size for leaf in leaves) == of_muon + 2 * (everything - of_muon)
    alone = build.make_optimizer(settings(muon=None), shapes, ROLES)
    leaves = jax.tree.leaves(jax.eval_shape(alone.init, shapes))
    assert sum(leaf.size for leaf in leaves if leaf.dtype == jnp.float32) == 2 * everything


def test_rates_depend_on_roles_and_gradient_clipping_is_global() -> None:
    """AdamW's first step has the size of the learning rate, whatever the gradient."""
    params, grads = drawn(), drawn(1)
    updates = {}
    for clip in (None, 1e-3):
        some = settings(max_grad_norm=clip, weight_decay=0.0)
        updates[clip], state = first_update(some, params, grads, ROLES)
        means = {n: m for n, m in found_momentum(state).items() if n.startswith("blocks")}
        norm = float(optax.tree.norm(grads))
        for name, mean in means.items():
            scale = 1.0 if clip is None else clip / norm
            np.testing.assert_allclose(mean, 0.15 * scale * grads[name], rtol=1e-4)
    rates = {"wte": 0.4, "head": 0.004, "extra.kernel": 1e-3, "extra.bias": 1e-3}
    for name, rate in (rates | {"blocks.0.norm": 1e-3}).items():
        np.testing.assert_allclose(np.abs(updates[None][name]), rate, rtol=1e-3)
    values = np.linalg.svd(np.asarray(updates[None]["blocks.0.up"]), compute_uv=False)
    assert 0.5 < np.median(values) / (0.5 * 0.02 * 2) < 1.35


def test_the_schedule_is_shared_and_the_matrices_rate_is_recorded() -> None:
    some = settings(schedule="trapezoid", warmdown_fraction=0.5, peak_lr=0.3)
    schedule = Schedule(dataclasses.replace(some, weight_decay=0.0), 10, ROLES)
    recorded = [schedule.learning_rate(n) for n in (0, 5, 9, 10)]
    assert recorded == pytest.approx([0.02, 0.02, 0.004, 0])
    assert Schedule(dataclasses.replace(some, muon=None), 10).learning_rate(0) == 0.3
    params, grads = drawn(), drawn(1)
    optimizer = build.make_optimizer(some, params, ROLES)
    state, sizes, update = optimizer.init(params), [], jax.jit(optimizer.update)
    for done in range(10):
        updates, state = update(grads, state, params, scalars=schedule.at(done))
        sizes.append({name: float(jnp.abs(updates[name]).mean()) for name in updates})
    for name in PARAMS:  # with a constant gradient, a step has the size of its rate
        assert sizes[9][name] / sizes[4][name] == pytest.approx(0.2, rel=0.05), name


def test_depthwise_kernels_keep_adamw() -> None:
    params = {"kernel": jnp.ones((3, 3, 4, 8)), "depthwise": jnp.ones((7, 7, 1, 8))}
    roles = {"kernels": param_groups.Role(prefix="", role="matrix")}
    updates, state = first_update(settings(weight_decay=0.0), params, params, roles)
    np.testing.assert_allclose(np.abs(updates["depthwise"]), 1e-3, rtol=1e-3)
    assert set(found_momentum(state)) == {"kernel"}


def test_roles_that_share_parameters_are_refused() -> None:
    overlapping = {**ROLES, "all": param_groups.Role(prefix="", role="matrix")}
    with pytest.raises(ValueError, match=r"blocks.0.q in matrices and all"):
        build.make_optimizer(settings(), drawn(), overlapping)


def test_the_kernels_of_wans_autoencoder_use_muon() -> None:
    model = wan_vae.Config.tiny()
    shapes = state.ModelDefinition(model.build).params
    params = {name: jnp.zeros(array.shape) for name, array in shapes.items()}
    optimizer = build.make_optimizer(settings(), params, model.optimizer_groups())
    momentum = found_momentum(optimizer.init(params))
    assert set(momentum) == {
        name for name, array in params.items() if len(array.shape) > 1 and array.shape[-2] > 1
    }


def test_a_model_without_matrices_is_refused() -> None:
    with pytest.raises(InputError, match=r"has no matrices .* --optim.muon None"):
        build.make_optimizer(settings(), drawn(), {})


def test_separate_groups_stay_separate() -> None:
    apart = param_groups.Group(prefix="extra.", peak_lr=0.5, b1=0.9, b2=0.9, weight_decay=0.0)
    params, grads = drawn(), drawn(1)
    groups = {**ROLES, "extra": apart}
    updates, _ = first_update(settings(weight_decay=0.0), params, grads, groups)
    np.testing.assert_allclose(np.abs(updates["extra.kernel"]), 0.5, rtol=1e-3)
    np.testing.assert_allclose(np.abs(updates["wte"]), 0.4, rtol=1e-3)


def test_the_rates_are_printed() -> None:
    model = gpt.Config.tiny()
    names = state.ModelDefinition(model.build).params
    said = build.muon_sentence(config.Muon(peak_lr=0.03), names, model.optimizer_groups())
    scale = (16 / 768) ** -0.5
    assert f"matrices 0.03, wte {0.2 * scale:.4g}, lm_head {0.004 * scale:.4g}" in said
    assert said.endswith("; no array uses optim.peak_lr")
    norms = llama.Config.tiny()
    said = build.muon_sentence(
        config.Muon(), state.ModelDefinition(norms.build).params, norms.optimizer_groups()
    )
    assert "; 5 arrays, such as head.norm, use optim.peak_lr" in said


@pytest.mark.parametrize(
    ("field", "value", "cure"),
    [
        ("peak_lr", 0.0, "above 0"),
        ("embedding_lr", -1.0, "above 0"),
        ("unembedding_lr", math.inf, "above 0"),
        ("momentum", 1.0, "of at least 0 and below 1"),
        ("momentum_steps", -1, "use at least 0"),
    ],
)
def test_meaningless_numbers_are_named(field: str, value: float, cure: str) -> None:
    with pytest.raises(InputError, match=rf"optim.muon.{field}={value}: .*{cure}"):
        config.Muon(**{field: value})
