"""Tests schedules against plain Python, groups, and AdamW against plain NumPy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain import config
from jaxtrain.errors import InputError
from jaxtrain.optim import build
from jaxtrain.optim.schedule import (
    Scalars,
    Schedule,
    half_cosine,
    schedule_change,
    warmup_steps,
)

PEAK = 3e-4
NAMES = ("cosine", "linear", "constant", "trapezoid")


def settings(schedule: str = "cosine", **changes: object) -> config.Optim:
    base = config.Optim(peak_lr=PEAK, schedule="cosine", warmup_steps=10)
    return dataclasses.replace(base, schedule=schedule, **changes)  # type: ignore[arg-type]


def by_hand(name: str, s: int, w: int, total: int, warmdown: int) -> float:
    """Computes the formulas in plain Python."""
    if s < w:
        return PEAK * (s + 1) / w
    s = min(s, total)
    p = (s - w) / (total - w)
    if name == "cosine":
        return PEAK * max(0.0, 0.5 * (1 + math.cos(math.pi * p)))
    if name == "linear":
        return PEAK * (1 - p)
    if name == "trapezoid":
        return PEAK * min(1.0, (total - s) / warmdown)
    return PEAK


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("warmup", "total"), [(10, 100), (0, 7), (2000, 100_000)])
def test_schedules_match_the_formulas(name: str, warmup: int, total: int) -> None:
    cfg = settings(name, warmup_steps=warmup, warmdown_fraction=0.3)
    rate = Schedule(cfg, total).learning_rate
    points = sorted({*range(min(total, 120)), *range(0, total + 50, max(total // 97, 1)), total})
    points += [warmup, max(warmup - 1, 0), warmup + 1, total - 1, total + 1, 10 * total]
    warmdown = int(0.3 * total + 1e-9)
    expected = [by_hand(name, s, warmup, total, warmdown) for s in points]
    got = [rate(s) for s in points]
    np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-15 * PEAK)


@pytest.mark.parametrize(("warmup", "total"), [(10, 100), (0, 7), (2000, 100_000)])
def test_rates_are_the_exact_ones_in_float32(warmup: int, total: int) -> None:
    """And those of optax, which computes in float32, up to one unit in the last place of the peak.

    Its cosine is a difference of numbers near one at the end of a run: 1e-4 of the rate there.
    """
    schedule = Schedule(settings("cosine", warmup_steps=warmup), total)
    optax_rate = optax.join_schedules(
        [
            optax.linear_schedule(PEAK / max(warmup, 1), PEAK, max(warmup - 1, 1)),
            optax.cosine_decay_schedule(PEAK, total - warmup),
        ],
        [warmup],
    )
    steps = np.linspace(0, total, min(total, 500) + 1).astype(int)
    found = np.array([schedule.scalars(s).values[1, 0, 0] for s in steps])
    exact = [by_hand("cosine", s, warmup, total, 0) for s in steps.tolist()]
    np.testing.assert_array_equal(found[steps < total], np.float32(exact)[steps < total])
    before = np.asarray(jax.vmap(optax_rate)(jnp.asarray(steps)))
    assert np.abs(found - before).max() <= np.spacing(np.float32(PEAK))


def test_half_a_cosine_is_exact_at_both_ends() -> None:
    for share in (0.0, 0.1, 0.5, 0.9, 1 - 1e-6, 1.0):
        exact = math.sin(0.5 * math.pi * (1 - share)) ** 2
        assert half_cosine(share) == pytest.approx(exact, rel=1e-15, abs=0)


def test_after_a_bad_step_the_scalars_are_those_of_the_step_before() -> None:
    """The host passes both, as it does not know yet whether a step was good."""
    schedule = Schedule(settings("linear", warmup_steps=3), 20)
    for done in (0, 1, 2, 9, 19):
        argument = schedule.scalars(done)
        for step in {done, max(done - 1, 0)}:
            found = schedule.of_step(Scalars(*map(jnp.asarray, argument)), jnp.uint32(step))
            for label, wanted in schedule.at(step).items():
                np.testing.assert_array_equal(np.array(found[label]), np.float32(wanted))


def test_the_change_of_the_rate_by_a_longer_run_is_described() -> None:
    linear = settings("linear", warmup_steps=0)
    short = (linear, 100)
    assert schedule_change(short, short, 100) is None
    assert schedule_change(short, (linear, 200), 100) == (
        "the learning rate schedule (linear) now covers 200 steps instead of 100: the rate at step "
        f"100 changes from 0 to {PEAK / 2:.3g}"
    )
    plateau = settings("trapezoid", warmup_steps=0, warmdown_fraction=0.2)
    assert schedule_change((plateau, 100), (plateau, 200), 50) == (
        "the learning rate schedule (trapezoid) now covers 200 steps instead of 100: the rate at "
        f"step 50 stays {PEAK:.3g}"
    )
    higher = dataclasses.replace(linear, peak_lr=2 * PEAK)
    assert schedule_change(short, (higher, 100), 50) == (
        f"the learning rate at step 50 changes from {PEAK / 2:.3g} to {PEAK:.3g}"
    )
    constant = settings("constant", warmup_steps=0)
    assert schedule_change((constant, 100), (constant, 200), 100) is None


def test_a_warmup_fraction_is_rounded_down() -> None:
    def length(share: float, total: int) -> int:
        cfg = settings(warmup_steps=None, warmup_fraction=share)
        return warmup_steps(cfg, total)

    assert [length(0.1, total) for total in (9, 10, 19, 20, 58_593)] == [0, 1, 1, 2, 5859]
    assert length(0.29, 100) == 29  # the product in floating point is 28.999999999999996


def test_the_rate_falls_by_one_minus_the_root() -> None:
    cfg = settings("trapezoid", warmdown_fraction=0.4, warmdown_to=0.1, warmdown_shape="sqrt")
    rate = [Schedule(cfg, 100).learning_rate(s) for s in range(120)]
    assert rate[10:61] == [PEAK] * 51
    for step in range(60, 120):
        fraction = 1 - 0.9 * math.sqrt(min(step - 60, 40) / 40)
        assert rate[step] == pytest.approx(PEAK * fraction, rel=1e-6)


def test_the_rate_falls_in_one_step() -> None:
    cfg = settings("trapezoid", warmdown_fraction=0.4, warmdown_to=0.1, warmdown_shape="step")
    rate = [Schedule(cfg, 100).learning_rate(s) for s in range(10, 120)]
    assert rate == pytest.approx([PEAK] * 50 + [0.1 * PEAK] * 60, rel=1e-12)


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_the_rate_falls_to_a_fraction_of_the_peak(name: str) -> None:
    full, part = (Schedule(settings(name, warmdown_to=to), 100) for to in (0.0, 0.1))
    for step in range(120):
        height = full.learning_rate(step) / PEAK
        wanted = height if step < 10 else 0.1 + 0.9 * height
        assert part.learning_rate(step) == pytest.approx(PEAK * wanted, rel=1e-12)


def test_updates_are_clipped_as_in_stable_adamw() -> None:
    """Algorithm 2 of https://arxiv.org/abs/2304.13013; a sudden gradient moves less."""
    cfg = settings("constant", peak_lr=0.1, warmup_steps=0, weight_decay=0.0, b2=0.9)
    cfg = dataclasses.replace(cfg, clip_updates=True, max_grad_norm=None)
    params = {"kernel": jnp.ones((3, 4))}
    optimizer = build.make_optimizer(cfg, params)
    state = optimizer.init(params)
    mean = squares = 0.0
    rng = np.random.default_rng(0)
    for step in range(1, 8):
        grad = rng.standard_normal((3, 4)).astype(np.float32) * (50 if step == 5 else 1)
        mean = 0.9 * mean + 0.1 * grad
        squares = 0.9 * squares + 0.1 * grad**2
        root = np.sqrt(squares / (1 - 0.9**step))
        rms = np.sqrt(np.mean((grad / root) ** 2))
        assert (rms > 1.5) == (step == 5)
        want = -0.1 * mean / (1 - 0.9**step) / (root + cfg.eps) / max(1, rms)
        scalars = Schedule(cfg, 100).at(step)
        updates, state = optimizer.update(
            {"kernel": jnp.asarray(grad)}, state, params, scalars=scalars
        )
        np.testing.assert_allclose(updates["kernel"], want, rtol=1e-4)


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match=r"warm-up of 100 steps .* run of 100 steps"):
        Schedule(settings(warmup_steps=100), 100)
    with pytest.raises(InputError, match=r"warm-up of 50 steps and the warm-down of 60 steps"):
        Schedule(settings("trapezoid", warmup_steps=50, warmdown_fraction=0.6), 100)


PARAMS = {
    "embed.table": np.ones((6, 4), np.float32),
    "block.kernel": np.full((3, 3, 4, 4), 0.5, np.float32),
    "block.bias": np.zeros(4, np.float32) + 0.1,
    "norm.scale": np.ones(4, np.float32),
    "temperature": np.float32(2.0).reshape(()),
}


def test_matrices_and_kernels_decay_except_embeddings() -> None:
    def decayed(**roles: config.Role) -> set[str]:
        return {name for name, array in PARAMS.items() if build.decays(name, array, roles)}

    assert decayed() == {"embed.table", "block.kernel"}
    assert decayed(wte=config.Role(prefix="embed.", role="embedding")) == {"block.kernel"}
    assert decayed(head=config.Role(prefix="block.", role="unembedding")) == {"embed.table"}
    assert decayed(all=config.Role(prefix="block.", role="matrix")) == decayed()


@pytest.mark.parametrize("muon", [None, config.Muon(peak_lr=0.02)])
@pytest.mark.parametrize("decouple_lr", [False, True])
def test_the_decay_of_a_run_is_its_sum_over_the_schedule(
    muon: config.Muon | None, decouple_lr: bool
) -> None:
    """The decay per step, whatever the peak rate, or times the rate."""
    some = settings(
        "trapezoid", warmup_steps=4, warmdown_fraction=0.25, weight_decay=0.1, peak_lr=8e-4
    )
    some = dataclasses.replace(some, muon=muon, decouple_lr=decouple_lr, max_grad_norm=None)
    groups = {"matrices": config.Role(prefix="blocks.", role="matrix", scale=0.5)}
    params = {"blocks.up": jnp.ones((4, 4))}
    optimizer = build.make_optimizer(some, params, groups)
    zeros, state = jax.tree.map(jnp.zeros_like, params), optimizer.init(params)
    update = jax.jit(optimizer.update)
    schedule = Schedule(some, 40, groups)
    for done in range(40):
        updates, state = update(zeros, state, params, scalars=schedule.at(done))
        params = {name: params[name] + updates[name] for name in params}
    peak = 8e-4 if muon is None else 0.5 * 0.02
    fraction = Schedule(dataclasses.replace(some, muon=None, peak_lr=1.0), 40).learning_rate
    steps = [1 - 0.1 * (1 if decouple_lr else peak) * fraction(s) for s in range(40)]
    np.testing.assert_allclose(params["blocks.up"], math.prod(steps), rtol=1e-5)


@pytest.mark.parametrize("muon", [None, config.Muon()])
def test_only_matrices_shrink_without_gradients(muon: config.Muon | None) -> None:
    """The decay is the rate times `weight_decay`, in AdamW, in Muon, and in separate groups."""
    params = {
        "blocks.0.up": jnp.ones((4, 8)),
        "blocks.0.norm": jnp.ones(4),
        "wte": jnp.ones((6, 4)),
        "head": jnp.ones((6, 4)),
        "scale": jnp.ones(()),
        "other.kernel": jnp.ones((3, 3, 2, 2)),
        "other.shift": jnp.ones(2),
    }
    groups = {
        "matrices": config.Role(prefix="blocks.", role="matrix"),
        "wte": config.Role(prefix="wte", role="embedding"),
        "head": config.Role(prefix="head", role="unembedding"),
        "other": config.Group(prefix="other.", peak_lr=0.1, b1=0.9, b2=0.9, weight_decay=0.2),
    }
    some = settings(warmup_steps=0, weight_decay=0.5, peak_lr=0.01, schedule="constant", muon=muon)
    optimizer = build.make_optimizer(some, params, groups)
    zeros = jax.tree.map(jnp.zeros_like, params)
    scalars = Schedule(some, 10, groups).at(0)
    updates, _ = jax.jit(optimizer.update)(zeros, optimizer.init(params), params, scalars=scalars)
    rate = 0.01 if muon is None else muon.peak_lr
    want = dict.fromkeys(params, 0.0) | {"blocks.0.up": -rate * 0.5, "other.kernel": -0.1 * 0.2}
    for name, update in updates.items():
        np.testing.assert_allclose(update, want[name], rtol=1e-6, err_msg=name)


def test_a_wrong_partition_is_named() -> None:
    wrong = {"a": frozenset({"embed.table", "block.bias", "ghost"}), "b": frozenset({"block.bias"})}
    with pytest.raises(ValueError, match="exactly one group") as caught:
        build.check_partition(PARAMS, wrong)
    for words in (
        "block.bias in a and b",
        "norm.scale in no group",
        "ghost in a, but not a parameter",
    ):
        assert words in str(caught.value)
    assert "embed.table" not in str(caught.value)


def adamw_by_hand(
    cfg: config.Optim, grads: list[dict[str, np.ndarray]], total: int
) -> dict[str, np.ndarray]:
    params = {name: array.astype(np.float64) for name, array in PARAMS.items()}
    mean = {name: np.zeros_like(array) for name, array in params.items()}
    square = {name: np.zeros_like(array) for name, array in params.items()}
    for s, grad in enumerate(grads):
        norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in grad.values()))
        scale = 1.0
        if cfg.max_grad_norm is not None and norm > cfg.max_grad_norm:
            scale = cfg.max_grad_norm / norm
        rate = by_hand(cfg.schedule, s, cfg.warmup_steps or 0, total, 1)
        for name, param in params.items():
            g = grad[name].astype(np.float64) * scale
            mean[name] = cfg.b1 * mean[name] + (1 - cfg.b1) * g
            square[name] = cfg.b2 * square[name] + (1 - cfg.b2) * g * g
            m = mean[name] / (1 - cfg.b1 ** (s + 1))
            v = square[name] / (1 - cfg.b2 ** (s + 1))
            decay = cfg.weight_decay if param.ndim >= 2 else 0.0
            params[name] = param - rate * (m / (np.sqrt(v) + cfg.eps) + decay * param)
    return params


@pytest.mark.parametrize("max_grad_norm", [1.0, 1e3, None])
def test_five_steps_match_adamw(max_grad_norm: float | None) -> None:
    total = 20
    cfg = settings(warmup_steps=2, weight_decay=0.3, max_grad_norm=max_grad_norm, peak_lr=PEAK)
    rng = np.random.default_rng(0)
    grads = [
        {name: np.asarray(rng.normal(size=a.shape) * 3, np.float32) for name, a in PARAMS.items()}
        for _ in range(5)
    ]
    optimizer = build.make_optimizer(cfg, PARAMS)
    params = {name: jnp.asarray(array) for name, array in PARAMS.items()}
    state = jax.jit(optimizer.init)(params)
    update = jax.jit(optimizer.update)
    for done, grad in enumerate(grads):
        scalars = Schedule(cfg, total).at(done)
        updates, state = update(grad, state, params, scalars=scalars)
        params = optax.apply_updates(params, updates)
    expected = adamw_by_hand(cfg, grads, total)
    for name, array in params.items():
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=1e-3 * PEAK, err_msg=name)
        moved = np.abs(expected[name] - PARAMS[name]).max()
        assert moved > PEAK, f"{name} did not move: the test would not see a fault"


def test_disabling_gradient_clipping_keeps_the_structure() -> None:
    on, off = (build.make_optimizer(settings(max_grad_norm=clip), PARAMS) for clip in (1.0, None))
    assert jax.tree.structure(on.init(PARAMS)) == jax.tree.structure(off.init(PARAMS))
