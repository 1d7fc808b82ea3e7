"""What is made of a config before any array is: the model, where its arrays go, the optimizer."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import optax

from jaxtrain import config
from jaxtrain import sharding as meshes
from jaxtrain.config import param_groups, run_length
from jaxtrain.optim import build as optim
from jaxtrain.training import skip_step
from jaxtrain.training import state as states
from jaxtrain.training import step as steps

_SOME_STEPS = _SOME_EXAMPLES = 10**6

Say = Callable[[str], None]
Spec = dict[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class Built:
    """Everything that a run's step is made of.

    Attributes:
        run: the config.
        definition: the model, without arrays.
        rule: where arrays are stored.
        schedule: completed updates -> learning rate.
        optimizer: float32 gradients -> updates.
        target: shapes and shardings of the state.
        spec: shapes and dtypes of a global batch.
        total: updates of the whole run.
    """

    run: config.Run
    definition: states.Definition
    rule: meshes.Rule
    schedule: optax.Schedule
    optimizer: optax.GradientTransformation
    target: states.State
    spec: Spec
    total: int

    def fresh_state(self) -> states.State:
        """The state that a run starts with."""
        return states.init(self.definition, self.optimizer, self.target, self.rule, self.run.seed)

    def compile_step(self, *, donate: bool = True) -> jax.stages.Compiled:
        """The training step, ready to be called."""
        return self.trace_step(donate=donate).lower().compile()

    def trace_step(self, *, donate: bool = True) -> jax.stages.Traced:
        """The training step before it is compiled for a platform."""
        step = steps.build_train_step(
            self.definition,
            self.optimizer,
            self.schedule,
            self.rule,
            skip_step.judge(
                self.run.optim,
                {k: one.prefix for k, one in _apart(self.run).items()},
                optim.warmup_steps(self.run.optim, self.total),
            ),
            precision=self.run.precision,
            accumulate=self.run.optim.accumulate,
            seed=self.run.seed,
        )
        jitted = steps.jit_train_step(
            step,
            self.target,
            self.rule.mesh,
            donate=donate,
            deterministic=self.run.deterministic,
        )
        return jitted.trace(self.target, self.spec)


def build(
    run: config.Run,
    mesh: jax.sharding.Mesh,
    examples: int,
    say: Say,
    position: run_length.Position = run_length.Position(),  # noqa: B008  frozen
) -> Built:
    """Resolves a config.

    Args:
        run: checked.
        mesh: over all devices; they may be abstract ones.
        examples: in an epoch of the training split.
        say: takes lines about what was resolved.
        position: where the run goes on.
    """
    definition = states.Definition(run.model.build)
    rule = meshes.Rule(mesh, run.mesh)
    parameters = states.parameter_count(definition.params)
    known = {
        "examples": examples,
        "parameters": parameters,
        "tokens_per_example": run.model.tokens_per_example(),
        "position": position,
    }
    total = run_length.resolve_steps(run, **known)
    rule_of_steps = run_length.steps_rule(run, total, **known)
    for line in run.model.formulas() if hasattr(run.model, "formulas") else ():
        say(line)
    say(f"{parameters:,} parameters; {rule_of_steps}; {batch_sentence(run)}")
    for name, shape in rule.unsharded(definition.params).items():
        say(f"not sharded: {name} {shape}: no dimension divides by mesh.fsdp {run.mesh.fsdp}")
    optimizer = optim.make(run.optim, total, definition.params, _groups(run), rule, run.precision)
    if run.optim.muon is not None:
        say(optim.muon_sentence(run.optim.muon, definition.params, _groups(run)))
    return Built(
        run=run,
        definition=definition,
        rule=rule,
        schedule=optim.recorded_schedule(run.optim, total),
        optimizer=optimizer,
        target=states.abstract(definition, optimizer, rule),
        spec=run.model.batch_spec(run.data.batch_size),
        total=total,
    )


def build_without_data(run: config.Run, mesh: jax.sharding.Mesh) -> Built:
    """As :func:`build`, in silence, where no data is at hand to say how long an epoch is.

    Epochs become some number of steps: the length of a run changes a constant in its program.
    """
    if run.loop.epochs is not None:
        loop = dataclasses.replace(run.loop, epochs=None, steps=_SOME_STEPS)
        run = dataclasses.replace(run, loop=loop)
    return build(run, mesh, _SOME_EXAMPLES, lambda line: None)


def _groups(run: config.Run) -> param_groups.Groups:
    """What the model says about its parameters."""
    has_some = hasattr(run.model, "optimizer_groups")
    return run.model.optimizer_groups() if has_some else {}


def _apart(run: config.Run) -> Mapping[str, param_groups.Group]:
    """The groups of parameters that the model sets apart."""
    return param_groups.apart(_groups(run))


def batch_sentence(run: config.Run) -> str:
    """What the global batch is made of, for the console."""
    return (
        f"{run.data.batch_size} examples a step = {run.rows_at_once} per device x "
        f"{run.mesh.devices} devices x "
        f"{run.optim.accumulate} accumulation"
    )
