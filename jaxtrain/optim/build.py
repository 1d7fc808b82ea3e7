"""Builds parameter groups, and combines their optimizers in one optax transformation.

The update takes the rates, decays, and momenta of the step as ``scalars``
(:meth:`jaxtrain.optim.schedule.Schedule.of_step`).
"""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain import config
from jaxtrain.config import param_groups
from jaxtrain.errors import InputError
from jaxtrain.optim import ema, muon
from jaxtrain.optim.schedule import ADAMW, GroupScalars, peak_of_role
from jaxtrain.sharding import HasShape, ShardingRule


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
    params: Mapping[str, HasShape],
    groups: param_groups.Groups | None = None,
    rule: ShardingRule | None = None,
    precision: config.Precision = "bfloat16",
) -> optax.GradientTransformationExtraArgs:
    """Builds gradient clipping by the global norm, followed by one optimizer per group.

    Each parameter has state only in its own group: two float32 numbers per element for AdamW, one
    for Muon.

    AdamW is Loshchilov and Hutter's (arXiv 1711.05101), with the decay multiplied by the rate, or
    with ``optim.decouple_lr`` by the rate as a fraction of its peak.

    Args:
        settings: which optimizers, their other constants, and clipping.
        params: dotted name -> array or shape; ``init`` and ``update`` take the same flat dict.
        groups: groups of the model. A separate group has its own rate and clipping, and its
            gradients do not count in the global norm of the rest; roles matter for
            ``optim.muon`` and weight decay (:func:`decays`).
        rule: where arrays are stored; Muon uses it to distribute its work over the devices.
        precision: of Muon's matmuls; everything else is float32.

    Raises:
        InputError: ``optim.muon`` is set, but the model has no matrices for it.
    """
    groups = groups or {}
    separate = param_groups.separate_groups(groups)
    owner = {name: _owner(name, separate) for name in params}
    decayed = {name for name, array in params.items() if decays(name, array, groups)}
    main_params = {name: array for name, array in params.items() if owner[name] is None}
    transforms: dict[str, optax.GradientTransformation] = {ADAMW: _adamw(ADAMW, settings, decayed)}
    labels = dict.fromkeys(params, ADAMW)  # `optax.partition` needs one also for masked names
    if settings.muon is not None:
        for label, (role, members) in _with_roles(main_params, groups).items():
            labels |= dict.fromkeys(members, label)
            transforms[label] = (
                muon.muon(settings.muon, label, precision, rule)
                if role.role == "matrix"
                else _adamw(label, settings, members, role.b1, role.b2)
            )
    main_transforms = [_clip(settings.max_grad_norm), optax.partition(transforms, labels)]
    if settings.average is not None:
        main_transforms.append(ema.averaging(settings.average))
    main = optax.chain(*main_transforms)
    if not separate:
        return main
    by_group = {"main": main} | {
        name: _adamw(name, settings, decayed, group.b1, group.b2)
        for name, group in separate.items()
    }
    return optax.partition(by_group, {name: group or "main" for name, group in owner.items()})


def _with_roles(
    params: Mapping[str, HasShape], groups: param_groups.Groups
) -> dict[str, tuple[config.Role, set[str]]]:
    """Returns each role, by label, and its parameters.

    Raises:
        InputError: the model has no matrices.
    """
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
    with_role = set().union(*members.values())
    check_partition(params, members | {ADAMW: set(params) - with_role})
    return {label: (role, members[label]) for label, role in roles.items()}


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
    rates = [f"{label} {peak_of_role(role, settings):.4g}" for label, role in roles.items()]
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


def _owner(name: str, separate: Mapping[str, param_groups.Group]) -> str | None:
    return next(
        (group for group, settings in separate.items() if name.startswith(settings.prefix)), None
    )


def _clip(max_norm: float | None) -> optax.GradientTransformation:
    # The state has the same structure without clipping, so a resumed run may turn it on or off.
    return optax.identity() if max_norm is None else optax.clip_by_global_norm(max_norm)


def _adamw(
    label: str,
    settings: config.Optim,
    decayed: Collection[str],
    b1: float | None = None,
    b2: float | None = None,
) -> optax.GradientTransformation:
    """Builds AdamW for a group; ``decayed`` are the names of the parameters that decay."""
    betas = settings.b1 if b1 is None else b1, settings.b2 if b2 is None else b2
    adam = optax.scale_by_adam(*betas, eps=settings.eps, mu_dtype=jnp.float32)
    clipped = _clipped(adam, betas[1], settings.eps) if settings.clip_updates else adam
    return optax.chain(clipped, _decayed_and_scaled(label, decayed))


def _decayed_and_scaled(
    label: str, decayed: Collection[str]
) -> optax.GradientTransformationExtraArgs:
    """Adds the weight decay to the updates of a group, and multiplies by its negative rate."""

    def update(
        updates: Any, state: Any, params: Any, *, scalars: Mapping[str, GroupScalars], **_: Any
    ) -> tuple[Any, Any]:
        group = scalars[label]

        def scaled(name: str, array: jax.Array) -> jax.Array:
            if name in decayed:
                array = array + group.decay * params[name]
            return -group.rate * array

        return {
            name: scaled(name, array) if isinstance(array, jax.Array) else array  # other groups'
            for name, array in updates.items()
        }, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


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
