"""Builds schedules and parameter groups, and combines them in one optax transformation.

A schedule maps ``s``, the number of completed steps, to the learning rate of the next one. ``T`` is
the length of the run and ``w`` that of the linear warm-up, in steps:

- warm-up: ``(s + 1) / w``, so the first step has a rate, and step ``w`` the peak;
- cosine: ``0.5 (1 + cos(pi p))`` with ``p = (s - w) / (T - w)``;
- linear: ``1 - p``;
- constant: 1;
- trapezoid (WSD): 1, then linear, or by ``1 - sqrt`` (https://arxiv.org/abs/2405.18392), to
  ``warmdown_to`` over the last ``d`` steps;

times the peak rate. After ``T`` the rate stays as at ``T``. The cosine and linear forms are those
of ``diffusers.get_scheduler`` and ``transformers``, warm-up and trapezoid are nanochat's.
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping

import jax
import jax.numpy as jnp
import optax

from jaxtrain import config
from jaxtrain.config import param_groups
from jaxtrain.errors import InputError
from jaxtrain.optim import ema, muon
from jaxtrain.sharding import HasShape, ShardingRule


def warmup_steps(settings: config.Optim, total_steps: int) -> int:
    """Returns the length of the warm-up in steps.

    Raises:
        InputError: the warm-up is not shorter than the run.
    """
    if settings.warmup_steps is not None:
        steps = settings.warmup_steps
    else:
        assert settings.warmup_fraction is not None, "config.validate() ensures that one is set"
        steps = _share(settings.warmup_fraction, total_steps)
    if steps >= total_steps:
        raise InputError(
            f"the warm-up of {steps} steps must be shorter than the run of {total_steps} steps: "
            "lower --optim.warmup_steps or --optim.warmup_fraction"
        )
    return steps


def schedule(
    settings: config.Optim, total_steps: int, peak_lr: float | None = None
) -> optax.Schedule:
    """Builds a schedule: completed steps (int [] of any width) -> learning rate, float32 [].

    Args:
        settings: the schedule's name, peak rate and lengths.
        total_steps: ``T``, steps of the run, warm-up included.
        peak_lr: replaces the peak rate of ``settings``.

    Raises:
        InputError: warm-up and warm-down do not fit into the run.
    """
    warmup = warmup_steps(settings, total_steps)
    peak = settings.peak_lr if peak_lr is None else peak_lr
    parts = _after_warmup(settings, peak, total_steps, warmup)
    if warmup:
        rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
        parts = optax.join_schedules([rise, parts], [warmup])

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        # Signed before any subtraction: the state counts in uint32.
        return jnp.asarray(parts(jnp.asarray(count).astype(jnp.int32)), jnp.float32)

    return rate


def _after_warmup(settings: config.Optim, peak: float, total: int, warmup: int) -> optax.Schedule:
    """Returns the rate ``s - w`` steps after the warm-up."""
    span = total - warmup
    if settings.schedule == "constant":
        # Independent of the run's length, so that an extended run needs no new compilation.
        return optax.constant_schedule(peak)
    if settings.schedule == "cosine":
        return optax.cosine_decay_schedule(peak, span)
    if settings.schedule == "linear":
        return optax.linear_schedule(peak, 0, span)
    warmdown = warmdown_steps(settings, total)
    if warmdown > span:
        raise InputError(
            f"the warm-up of {warmup} steps and the warm-down of {warmdown} steps "
            f"(optim.warmdown_fraction={settings.warmdown_fraction}) are longer than the run "
            f"of {total} steps: lower one of them"
        )
    length = max(warmdown, 1)  # optax takes 0 for a constant
    end = settings.warmdown_to * peak
    if settings.warmdown_shape == "linear":
        return optax.linear_schedule(peak, end, length, transition_begin=span - length)

    def by_root(count: jax.typing.ArrayLike) -> jax.Array:
        passed = jnp.clip((jnp.asarray(count) - (span - length)) / length, 0.0, 1.0)
        return peak + (end - peak) * jnp.sqrt(passed)

    return by_root


def warmdown_steps(settings: config.Optim, total_steps: int) -> int:
    """Returns the length of the warm-down of a trapezoid, in steps."""
    return _share(settings.warmdown_fraction, total_steps)


def recorded_schedule(settings: config.Optim, total_steps: int) -> optax.Schedule:
    """Builds the schedule of the recorded learning rate: Muon's, if it is on."""
    peak = None if settings.muon is None else settings.muon.peak_lr
    return schedule(settings, total_steps, peak)


def schedule_change(
    before: tuple[config.Optim, int], after: tuple[config.Optim, int], done: int
) -> str | None:
    """Returns how the learning rate of a resumed run differs from before; None if it does not.

    Args:
        before: settings and total steps of the run that saved the checkpoint.
        after: of this run.
        done: completed steps.

    Raises:
        InputError: warm-up and warm-down do not fit into a run.
    """
    old, new = (float(recorded_schedule(*recorded)(done)) for recorded in (before, after))
    (_, old_total), (settings, total) = before, after
    same = math.isclose(old, new, rel_tol=1e-6)
    if same and (old_total == total or settings.schedule == "constant"):
        return None
    rate = f"stays {new:.3g}" if same else f"changes from {old:.3g} to {new:.3g}"
    if old_total == total:
        return f"the learning rate at step {done} {rate}"
    return (
        f"the learning rate schedule ({settings.schedule}) now covers {total} steps instead of "
        f"{old_total}: the rate at step {done} {rate}"
    )


def decays(name: str, array: HasShape, groups: param_groups.Groups) -> bool:
    """Returns whether weight decay applies to a parameter, whatever its optimizer.

    It applies to arrays of two and more dimensions (matrices, kernels), but not to biases, norms
    and scalars, nor to what the model calls an embedding or an output layer.

    Args:
        name: its dotted name.
        array: the parameter, or its shape.
        groups: of the model.
    """
    roles = param_groups.roles(groups).values()
    embeds = any(role.role != "matrix" and name.startswith(role.prefix) for role in roles)
    return len(array.shape) >= 2 and not embeds


def check_partition(
    params: Mapping[str, HasShape], members_of: Mapping[str, Collection[str]]
) -> None:
    """Checks that each parameter is in exactly one group, and that groups have no other names.

    Raises:
        ValueError: lists the names at fault.
    """
    owners: dict[str, list[str]] = {name: [] for name in params}
    for group, members in members_of.items():
        for name in members:
            owners.setdefault(name, []).append(group)
    misplaced = {name: of for name, of in owners.items() if len(of) != 1 or name not in params}
    if misplaced:
        listed = "; ".join(
            f"{name} {'in ' + ' and '.join(of) if of else 'in no group'}"
            + ("" if name in params else ", but not a parameter")
            for name, of in sorted(misplaced.items())
        )
        raise ValueError(f"each parameter must be in exactly one group: {listed}")


def make_optimizer(
    settings: config.Optim,
    total_steps: int,
    params: Mapping[str, HasShape],
    groups: param_groups.Groups | None = None,
    rule: ShardingRule | None = None,
    precision: config.Precision = "bfloat16",
) -> optax.GradientTransformation:
    """Builds gradient clipping by the global norm, followed by one optimizer per group.

    Each parameter has state only in its own group: two float32 numbers per element for AdamW, one
    for Muon. Each group has a step count.

    AdamW is Loshchilov and Hutter's (arXiv 1711.05101), with the decay multiplied by the rate, or
    with ``optim.decouple_lr`` by the rate as a fraction of its peak.

    Args:
        settings: rates, decay, clipping.
        total_steps: steps of the run.
        params: dotted name -> array or shape; ``init`` and ``update`` take the same flat dict.
        groups: groups of the model. A separate group has its own rate and clipping, and its
            gradients do not count in the global norm of the rest; roles matter for
            ``optim.muon`` and weight decay (:func:`decays`).
        rule: where arrays are stored; Muon uses it to distribute its work over the devices.
        precision: of Muon's matmuls; everything else is float32.

    Raises:
        InputError: ``optim.muon`` is set, but the model has no matrices for it.
    """
    separate = param_groups.separate_groups(groups or {})
    owner = {name: _owner(name, separate) for name in params}
    main_params = {name: array for name, array in params.items() if owner[name] is None}
    of_matrices = functools.partial(
        muon.muon,
        precision=precision,
        rule=rule,
        span=muon.Span(total_steps, warmdown_steps(settings, total_steps)),
    )
    transforms, labels = _main(settings, total_steps, main_params, groups or {}, of_matrices)
    # `optax.partition` needs a label for each name; the outer one masks these.
    labels |= {name: "no_decay" for name in params if name not in main_params}
    parts_of_main = [_clip(settings.max_grad_norm), optax.partition(transforms, labels)]
    if settings.average is not None:
        parts_of_main.append(ema.averaging(settings.average))
    main = optax.chain(*parts_of_main)
    if not separate:
        return main
    decayed = {name: decays(name, array, groups or {}) for name, array in params.items()}
    parts = {"main": main} | {
        name: _of_group(group, settings, decayed) for name, group in separate.items()
    }
    return optax.partition(parts, {name: group or "main" for name, group in owner.items()})


def _main(
    settings: config.Optim,
    total_steps: int,
    params: Mapping[str, HasShape],
    groups: param_groups.Groups,
    of_matrices: Callable[..., optax.GradientTransformation],
) -> tuple[dict[str, optax.GradientTransformation], dict[str, str]]:
    """Returns optimizers by label, and the label of each parameter outside separate groups."""
    rate = schedule(settings, total_steps)
    transforms = {
        "decay": _adamw(settings, rate, _decay(settings, settings.peak_lr)),
        "no_decay": _adamw(settings, rate, 0.0),
    }
    labels = {
        name: "decay" if decays(name, array, groups) else "no_decay"
        for name, array in params.items()
    }
    if settings.muon is None:
        return transforms, labels
    roles = param_groups.roles(groups)
    if not any(role.role == "matrix" for role in roles.values()):
        raise InputError(
            "optim.muon is set, but this model has no matrices for it: set --optim.muon None"
        )
    members = {label: _members(role, params) for label, role in roles.items()}
    for label, role in roles.items():
        if not members[label]:
            raise ValueError(
                f"the model's group {label} has no parameters: none begins with {role.prefix!r}"
            )
        peak_lr = _peak(role, settings.muon)
        rate = schedule(settings, total_steps, peak_lr)
        transforms[label] = (
            of_matrices(settings.muon, rate, weight_decay=_decay(settings, peak_lr))
            if role.role == "matrix"
            else _adamw(settings, rate, role.weight_decay, role.b1, role.b2)
        )
        labels |= dict.fromkeys(members[label], label)
    with_role = set().union(*members.values())
    check_partition(params, members | {"peak_lr": set(params) - with_role})
    return transforms, labels


def rate_flag(settings: config.Optim) -> str:
    """Returns the flag that sets the learning rate of the matrices, for advice in messages."""
    return "--optim.peak_lr" if settings.muon is None else "--optim.muon.peak_lr"


def muon_sentence(
    settings: config.Muon, params: Mapping[str, HasShape], groups: param_groups.Groups
) -> str:
    """Describes the peak rate of each role, and which parameters use ``optim.peak_lr``.

    Args:
        settings: Muon's settings.
        params: dotted name -> array.
        groups: groups of the model.
    """
    roles = param_groups.roles(groups)
    rates = [f"{label} {_peak(role, settings):.4g}" for label, role in roles.items()]
    left = _with_peak_lr(params, groups)
    rest = f"{len(left)} arrays, such as {min(left)}, use" if left else "no array uses"
    return f"optim.muon: peak rates {', '.join(rates)}; {rest} optim.peak_lr"


def without_effect(
    settings: config.Optim, params: Mapping[str, HasShape], groups: param_groups.Groups
) -> str | None:
    """Returns a warning if no parameter uses ``optim.peak_lr``, and names the fields that count."""
    if settings.muon is None or _with_peak_lr(params, groups):
        return None
    roles = {role.role for role in param_groups.roles(groups).values()}
    fields = {
        "matrix": "peak_lr",
        "embedding": "embedding_lr",
        "unembedding": "unembedding_lr",
        "scalar": "scalar_lr",
    }
    instead = [f"--optim.muon.{field}" for role, field in fields.items() if role in roles]
    return (
        f"warning: optim.peak_lr {settings.peak_lr:g} has no effect, because optim.muon sets the "
        f"rates of all parameters: set {', '.join(instead)}, or --optim.muon None to use AdamW"
    )


def _with_peak_lr(params: Mapping[str, HasShape], groups: param_groups.Groups) -> list[str]:
    """Returns the parameters that use ``optim.peak_lr`` although ``optim.muon`` is set."""
    roles, separate = param_groups.roles(groups), param_groups.separate_groups(groups)
    taken = set().union(*(_members(role, params) for role in roles.values()))
    return [name for name in params if name not in taken and _owner(name, separate) is None]


def _members(role: config.Role, params: Mapping[str, HasShape]) -> set[str]:
    """Returns a role's parameters.

    A block's vectors, such as norms, keep AdamW, and so do depthwise kernels [..., 1, channels]:
    their outputs share no inputs.
    """
    return {
        name
        for name, array in params.items()
        if name.startswith(role.prefix) and (role.role != "matrix" or _is_matrix(array))
    }


def _is_matrix(array: HasShape) -> bool:
    return len(array.shape) >= 2 and array.shape[-2] > 1


def _peak(role: config.Role, settings: config.Muon) -> float:
    rates = {
        "matrix": settings.peak_lr,
        "embedding": settings.embedding_lr,
        "unembedding": settings.unembedding_lr,
        "scalar": settings.scalar_lr,
    }
    return role.scale * rates[role.role]


def _owner(name: str, separate: Mapping[str, param_groups.Group]) -> str | None:
    return next(
        (group for group, settings in separate.items() if name.startswith(settings.prefix)), None
    )


def _clip(max_norm: float | None) -> optax.GradientTransformation:
    # The state has the same structure without clipping, so a resumed run may turn it on or off.
    return optax.identity() if max_norm is None else optax.clip_by_global_norm(max_norm)


def _of_group(
    group: config.Group, settings: config.Optim, decayed: Mapping[str, bool]
) -> optax.GradientTransformation:
    adamw = optax.adamw(
        group.peak_lr,
        b1=group.b1,
        b2=group.b2,
        eps=settings.eps,
        weight_decay=group.weight_decay,
        mask=decayed,
        mu_dtype=jnp.float32,
    )
    return optax.chain(_clip(group.max_grad_norm), adamw)


def _decay(settings: config.Optim, peak_lr: float) -> float:
    """Returns the decay that the rate multiplies."""
    return settings.weight_decay / peak_lr if settings.decouple_lr else settings.weight_decay


def _adamw(
    settings: config.Optim,
    rate: optax.Schedule,
    weight_decay: float,
    b1: float | None = None,
    b2: float | None = None,
) -> optax.GradientTransformation:
    betas = settings.b1 if b1 is None else b1, settings.b2 if b2 is None else b2
    adam = optax.scale_by_adam(*betas, eps=settings.eps, mu_dtype=jnp.float32)
    return optax.chain(  # as in optax.adamw
        _clipped(adam, betas[1], settings.eps) if settings.clip_updates else adam,
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(rate),
    )


def _clipped(
    adam: optax.GradientTransformation, b2: float, eps: float
) -> optax.GradientTransformation:
    """Adds StableAdamW's update clipping (https://arxiv.org/abs/2304.13013, algorithm 2) to Adam.

    An update is divided by the RMS of ``gradient / sqrt(mean of squares)``, if it is above 1. The
    state is that of Adam, so a resumed run may turn it on or off.
    """

    def update(
        grads: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        updates, state = adam.update(grads, state, params)
        assert isinstance(state, optax.ScaleByAdamState), "made by optax.scale_by_adam"
        correction = 1 - b2**state.count

        def clipped(update: jax.Array, grad: jax.Array, squares: jax.Array) -> jax.Array:
            wide = jnp.square(grad.astype(jnp.float32))
            mean = jnp.mean(wide / jnp.maximum(squares / correction, eps**2))
            return update / jnp.maximum(1.0, jnp.sqrt(mean)).astype(update.dtype)

        return jax.tree.map(clipped, updates, grads, state.nu), state

    return optax.GradientTransformation(adam.init, update)


def _share(fraction: float, total: int) -> int:
    """Rounds down, like ``total // 10``; 0.29 x 100 is 29, although the product is 28.999..."""
    return int(fraction * total + 1e-9)
