"""Builds the parts of a training step from a config: the model, the shardings, and the optimizer.

Neither data nor devices are needed, so ``plan`` and ``bench`` use this, too.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import cast

import jax
import optax

from jaxtrain import config
from jaxtrain.config import param_groups, run_length
from jaxtrain.config.run_length import Position
from jaxtrain.cost.step_cost import StepCost
from jaxtrain.ops import attention
from jaxtrain.optim.build import make_optimizer, muon_sentence, without_effect
from jaxtrain.optim.schedule import Schedule
from jaxtrain.sharding import ShardingRule
from jaxtrain.terminal import Say
from jaxtrain.training import skip_step
from jaxtrain.training.model_flops import model_flops
from jaxtrain.training.state import ModelDefinition, State, abstract_state, jit_init, saved_part
from jaxtrain.training.state_size import parameter_count
from jaxtrain.training.step import build_train_step, jit_train_step

_SOME_STEPS = _SOME_EXAMPLES = 10**6

Spec = dict[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class StepSetup:
    """The parts of a training step.

    Attributes:
        optimizer: float32 gradients -> parameter updates.
        total_steps_of: total steps of a run of other length or batch size, at the same position.
    """

    run: config.Run
    definition: ModelDefinition
    rule: ShardingRule
    schedule: Schedule
    optimizer: optax.GradientTransformationExtraArgs
    target: State
    spec: Spec
    total: int
    total_steps_of: Callable[[config.Run], int]

    @property
    def saved(self) -> State:
        """Returns the part of :attr:`target` that a checkpoint stores."""
        return saved_part(self.target, self.definition.file_weights)

    def fresh_state(self) -> State:
        """Returns the initial state of a new run."""
        make = jit_init(self.definition, self.optimizer, self.target, self.rule, self.run.seed)
        return cast(State, make())

    def compile_step(self, *, donate: bool = True, profiled: bool = False) -> jax.stages.Compiled:
        """Compiles the training step for the devices of the mesh."""
        with self.lowering():
            return self.trace_step(donate=donate, profiled=profiled).lower().compile()

    def lowering(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context in which a traced step is lowered and compiled.

        Both, because attention for several devices is lowered while the program is compiled.
        """
        reproducible = self.run.deterministic
        return attention.reproducible_gradients() if reproducible else contextlib.nullcontext()

    def cost(
        self,
        traced: jax.stages.Traced,
        compiled: jax.stages.Compiled,
        gpus_per_node: int | None = None,
    ) -> StepCost:
        """Returns what the step costs; see :meth:`jaxtrain.cost.step_cost.StepCost.of`."""
        needed = model_flops(self.run.training_model) * self.run.data.batch_size
        mesh = self.rule.mesh
        return StepCost.of(
            traced.jaxpr, compiled, mesh, model_flops=needed, gpus_per_node=gpus_per_node
        )

    def trace_step(self, *, donate: bool = True, profiled: bool = False) -> jax.stages.Traced:
        """Traces the step, as :func:`jaxtrain.training.step.jit_train_step` describes."""
        separate = param_groups.separate_groups(self.run.model.optimizer_groups())
        step = build_train_step(
            self.definition,
            self.optimizer,
            self.schedule,
            self.rule,
            skip_step.detector(
                self.run.optim, {name: group.prefix for name, group in separate.items()}
            ),
            precision=self.run.precision,
            accumulate=self.run.optim.accumulate,
            seed=self.run.seed,
            receive=self.run.received,
        )
        jitted = jit_train_step(
            step,
            self.target,
            self.rule.mesh,
            donate=donate,
            gpu_options=self.run.model.gpu_options,
            deterministic=self.run.deterministic,
            profiled=profiled,
        )
        return jitted.trace(self.target, self.spec, self.schedule.spec)


def build_step_setup(
    run: config.Run,
    mesh: jax.sharding.Mesh,
    examples: int,
    say: Say,
    position: Position = Position(),  # noqa: B008  frozen
) -> StepSetup:
    """Builds the parts of a training step."""
    freeze, groups = run.model.freeze, run.model.optimizer_groups()
    definition = ModelDefinition(run.training_model.build, freeze)
    trained = definition.trained(definition.params)
    param_groups.check_trained(freeze, trained, groups)
    rule = ShardingRule(mesh, run.mesh)
    parameters = parameter_count(definition.params)
    length_inputs = {
        "examples": examples,
        "parameters": parameters,
        "tokens_per_example": run.model.tokens_per_example(),
        "position": position,
    }

    def total_steps_of(other: config.Run) -> int:
        return run_length.resolve_steps(other, **length_inputs)

    total = total_steps_of(run)
    length_explanation = run_length.steps_rule(run, total, **length_inputs)
    for line in run.model.notes():
        say(line)
    say(f"{parameters:,} parameters; {length_explanation}")
    if definition.frozen:
        say(f"frozen: {parameters - parameter_count(trained):,} parameters ({' '.join(freeze)})")
    say(batch_sentence(run))
    largest = run.model.largest_rate
    if largest is not None and run.optim.peak_lr > largest and run.optim.muon is None:
        say(
            f"warning: --optim.peak_lr {run.optim.peak_lr:g} is high for layers as wide as this "
            f"model's, and training may diverge: use at most {largest:.2g}"
        )
    for name, shape in rule.unsharded(trained).items():
        say(f"not sharded: {name} {shape}: no dimension is divisible by mesh.fsdp {run.mesh.fsdp}")
    optimizer = make_optimizer(run.optim, trained, groups, rule, run.precision)
    if run.optim.muon is not None:
        say(muon_sentence(run.optim.muon, trained, groups))
        unused = without_effect(run.optim, trained, groups)
        if unused and "--optim.peak_lr" in config.equivalent_arguments(run):
            say(unused)
    return StepSetup(
        run=run,
        definition=definition,
        rule=rule,
        schedule=Schedule(run.optim, total, groups),
        optimizer=optimizer,
        target=abstract_state(definition, optimizer, rule),
        spec=run.sent_spec(run.data.batch_size),
        total=total,
        total_steps_of=total_steps_of,
    )


def build_without_data(run: config.Run, mesh: jax.sharding.Mesh) -> StepSetup:
    """Calls :func:`build_step_setup` silently, without the number of examples in an epoch.

    It replaces epochs by an arbitrary number of steps, which does not change the compiled step.
    """
    if run.loop.epochs is not None:
        loop = dataclasses.replace(run.loop, epochs=None, steps=_SOME_STEPS)
        run = dataclasses.replace(run, loop=loop)
    return build_step_setup(run, mesh, _SOME_EXAMPLES, lambda line: None)


def batch_sentence(run: config.Run) -> str:
    """Returns a console line on how the global batch is divided."""
    devices, microbatches = run.mesh.devices, run.optim.accumulate
    return (
        f"{run.data.batch_size} examples per step = {run.microbatch_size} per device x "
        f"{devices} {'device' if devices == 1 else 'devices'} x "
        f"{microbatches} {'microbatch' if microbatches == 1 else 'microbatches'}"
    )


def validation_batch_size(run: config.Run, available: int | None = None) -> int:
    """Returns the global batch size of validations.

    At most a microbatch, or as much less as its examples are larger than those of training
    (``data.crop``), but at least one example per device, whose memory no plan knows.

    Args:
        available: number of examples for validation; None if it is unknown.
    """
    examples = run.loop.eval_examples if available is None else available
    examples = max(1, min(run.loop.eval_examples, examples))
    devices = run.mesh.devices
    wanted = -(-examples // devices) * devices
    fitting = int(run.data.batch_size // run.optim.accumulate / devices / run.validation_scale)
    return min(max(1, fitting) * devices, wanted)
