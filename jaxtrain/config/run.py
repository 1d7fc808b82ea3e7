"""The config of a run: ``Run`` and its sections.

A config file in ``configs/`` builds one :class:`Run`; :mod:`jaxtrain.config.loading` finds it by
name, applies the overrides of the command line and checks it before any device is touched. The
classes of ``Run.model`` and ``Run.data`` are next to the code that reads them.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from jaxtrain.config import bounds, checks, field_values, invocation, overrides

Precision = Literal["bfloat16", "float32"]
Shard = Literal["params", "optimizer", "none"]
BadUpdates = Literal["off", "skip", "rollback"]
Schedule = Literal["cosine", "linear", "constant", "trapezoid"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Average(bounds.Section):
    """Moving average (EMA) of the parameters. Validation, samples, and exports use it."""

    section = "optim.average"

    rule: Literal["ema", "ramp"] = "ema"
    """EMA warm-up: the decay after n averaged steps is at most (1 + n) / (10 + n) (ema), or n / 10
    (ramp), as in TAEHV's recipe, which uses decay 0.95."""
    decay: Annotated[float, bounds.Bounds(above=0, below=1)] = 0.999
    """EMA decay: the fraction of the average that is kept each time, below 1."""
    every: bounds.Count = 1
    """Interval at which the parameters enter the average, in steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(bounds.Section):
    """Muon for the matrices of a model's blocks, and for kernels of convolutions. See
    https://kellerjordan.github.io/posts/muon/.

    Embeddings, output layers, and trained scalars of language models use AdamW with their own
    learning rates, all other parameters AdamW with optim.peak_lr. All follow one schedule; a
    discriminator's rate (model.adversary.peak_lr) is constant.
    """

    section = "optim.muon"
    first_momentum: ClassVar[float] = 0.85  # as in nanochat and modded-nanogpt

    peak_lr: bounds.Positive = 0.02
    """Peak learning rate of the matrices, multiplied by max(1, outputs / inputs)^0.5."""
    embedding_lr: bounds.Positive = 0.2
    """AdamW peak learning rate of the embedding, multiplied by the model's factor for its width."""
    unembedding_lr: bounds.Positive = 0.004
    """AdamW peak learning rate of the output layer, multiplied by the model's factor for its
    width."""
    momentum: bounds.Fraction = 0.95
    """Muon momentum after the momentum warm-up."""
    momentum_steps: Annotated[int, bounds.Bounds(least=0)] = 300
    """Length of the momentum warm-up, in steps: from 0.85, linearly to momentum, unless the fall to
    last_momentum is already below that."""
    last_momentum: bounds.Fraction | None = None
    """Muon momentum at the end of the run, to which it falls linearly during the warm-down of
    optim.schedule trapezoid. None keeps momentum."""
    equilibrate: bool = False
    """Scale the part of the momentum that belongs to each output of a matrix to one norm, before
    the matrix is orthogonalized."""
    polar_express: bool = False
    """Orthogonalize with the five different polynomials of Polar Express, which come closer than
    five times the same one."""
    variance_b2: bounds.Fraction | None = None
    """Variance reduction: divide the update of each output of a matrix (of each input, if there are
    more of them) by the root of a moving average of its mean square, and keep the norm of the
    matrix's update. This is the average's decay per step. None turns it off."""
    cautious_decay: bool = False
    """Apply optim.weight_decay to matrices only where it agrees with the update in sign, and lower
    it from the first to the last step to zero, by half a cosine. It is then also multiplied by
    max(1, outputs / inputs)^0.5."""
    scalar_lr: bounds.Positive = 0.5
    """AdamW peak learning rate of trained scalars, multiplied by the model's factor for each of
    them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optim:
    """Optimizer and learning rate: AdamW, or with optim.muon Muon for matrices and AdamW for the
    rest. A step is one optimizer step; schedules count steps."""

    peak_lr: bounds.Positive
    """Learning rate at the end of the warm-up."""
    schedule: Schedule
    """Learning rate after the warm-up. cosine: cosine decay; linear: linear decay; constant: the
    peak; trapezoid (WSD, warmup-stable-decay): the peak, then decay. All but constant end at
    optim.warmdown_to."""
    warmup_steps: int | None = None
    """Length of the linear warm-up, in steps; the first has a rate. Set this or warmup_fraction."""
    warmup_fraction: bounds.Fraction | None = None
    """Length of the warm-up as a fraction of all steps, rounded down. Set this or warmup_steps."""
    warmdown_fraction: bounds.ClosedFraction = 0.2
    """trapezoid only: length of the final decay as a fraction of all steps, rounded down."""
    warmdown_to: bounds.ClosedFraction = 0.0
    """The learning rate at the end of the decay, as a fraction of the peak."""
    warmdown_shape: Literal["linear", "sqrt", "step"] = "linear"
    """trapezoid only: the final decay, at a fraction p: linear 1 - p, sqrt 1 - sqrt(p), step 0."""
    b1: bounds.Fraction = 0.9
    """AdamW beta1: decay of the mean of gradients, per step."""
    b2: bounds.Fraction = 0.95
    """AdamW beta2: decay of the mean of squared gradients, per step."""
    eps: bounds.Positive = 1e-8
    """AdamW epsilon, added to the root of the mean of squared gradients."""
    clip_updates: bool = False
    """StableAdamW: divide each array's AdamW update by the RMS of its gradient, relative to the
    root of the mean of squared gradients, where that is above 1. Muon's updates are not clipped."""
    weight_decay: float = 1e-2
    """Weight decay per step, multiplied by the learning rate (see decouple_lr), in AdamW and Muon;
    not applied to biases, norms, and the embedding and output layer of GPT and Llama, for which
    model.recipe 2026 has values of its own."""
    decouple_lr: bool = False
    """Multiply weight_decay by the rate as a fraction of its peak, and not by the rate itself: then
    it does not depend on the peak rate. It is decouple_lr of optimi, and what Composer's decoupled
    optimizers do. 1e-5 with it is 0.0125 without it at a peak rate of 8e-4."""
    accumulate: bounds.Count = 1
    """Gradient accumulation: microbatches per step. More microbatches need less
    memory; data.batch_size stays the global batch size."""
    max_grad_norm: bounds.Positive | None = 1.0
    """Gradient clipping: the largest global norm. None turns it off."""
    muon: Muon | None = None
    """Muon for the matrices of models that support it. None uses AdamW for all parameters."""
    average: Average | None = None
    """Moving average of the parameters, which needs as much memory as they do. None turns it
    off."""
    bad_updates: BadUpdates = "rollback"
    """What to do with a bad step: one whose loss or gradient is NaN/Inf, or whose gradient norm is
    above 20 times the median of the last 128 good steps (after the warm-up, and at least 32 good
    steps). off: ignore the norm, and end the run at NaN/Inf, which is known only if each step waits
    for the one before it; skip: keep the parameters, continue with the next examples, and end the
    run after ten bad steps in a row; rollback: like skip, but after ten, restore the newest
    checkpoint and continue with the examples after the bad ones. A run that NaN/Inf ends saves the
    state before it for the command find-nan."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """The device mesh: data x fsdp devices."""

    data: bounds.Count
    """Number of groups of fsdp devices; each group holds a full copy of the state."""
    fsdp: bounds.Count
    """Number of devices that share one copy of parameters and optimizer state, unless shard is
    none."""
    shard: Shard
    """What is sharded along fsdp. params: parameters and optimizer state, with each block gathered
    where it is used (ZeRO-3); optimizer: the same, but parameters are gathered once per step
    (effectively ZeRO-2); none: nothing."""
    min_shard_elements: int = 2**14
    """Smallest array that is sharded, in elements; smaller ones are replicated."""
    auto: bool = False
    """Fit the run to the available devices: whenever it starts or resumes, choose data, fsdp, and
    optim.accumulate, but keep data.batch_size, so that training does not change, up to rounding."""

    @property
    def devices(self) -> int:
        """Number of devices of the run."""
        return self.data * self.fsdp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """Length, logging, validation, and end. Set one of steps, epochs, tokens_per_param."""

    steps: bounds.Count | None = None
    """Length of the run, in steps."""
    epochs: bounds.Count | None = None
    """Length of the run, in passes over the training examples, rounded down to full batches."""
    tokens_per_param: bounds.Positive | None = None
    """Length of the run, in training tokens per parameter of the model."""
    log_every: bounds.Count
    """Interval between lines on the console and in metrics.jsonl, in steps."""
    eval_every: bounds.Count | None = None
    """Interval between validations, in steps. None turns it off."""
    eval_examples: bounds.Count
    """Number of validation examples, the same ones each time; if there are fewer, all of them.
    Those of videos are evenly over the videos, and metrics are means over videos."""
    hang_timeout_s: bounds.Positive | None = 1800.0
    """Hang detection: seconds without progress after which the run prints its stacks and exits
    with code 75. None turns it off."""
    stop_timeout_s: bounds.Positive = 300.0
    """Longest time from SIGTERM to the end of the run, in seconds. Usually the run finishes the
    current step or validation batch, saves, and ends; after this time it ends without saving."""
    replay_every: bounds.Count | None = None
    """Check of the devices: interval at which a step is computed twice and compared bit by bit, in
    steps. 120 costs about 1% of the time, and the memory for a second state. After a difference,
    the run exits with code 75, and resumes from the newest checkpoint up to the last equal results.
    GPUs require deterministic. None turns it off."""
    max_hours: bounds.Positive | None = None
    """Time limit, in hours since the start of the program. Then the run finishes the current step,
    saves, and ends with exit code 130, after which launchers do not restart it. Each start of the
    run has the full time. None turns it off."""
    max_total_hours: bounds.Positive | None = None
    """The same limit for all starts of the run together, from the start of each program to its last
    record. What is used up counts at the next start, so that a run that fails again and again does
    not keep a rented machine forever. None turns it off."""
    leave_notice: str | None = None
    """Where the provider of this machine says that it takes it back: aws or gce, the machine's
    metadata there, or the path of a file that appears then. The run then saves and ends with exit
    code 75, as after SIGTERM, which SLURM and Kubernetes send. None asks for nothing."""
    record_examples: bool = False
    """Write the examples of each step to examples.jsonl (examples.<process>.jsonl)."""
    gates: tuple[str, ...] = ()
    """What a run must have reached, such as "val/psnr > 24 at 5000": the first validation after
    5000 steps or more must meet it, or the run saves and ends there with exit code 4, after which
    launchers do not restart it. Several are separated by spaces, each in quotes."""
    early_stop_patience: bounds.Count | None = None
    """Early stopping: number of validations without a better checkpoint.best_metric, less than the
    run has. None turns it off."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """How often checkpoints are saved, and which are kept."""

    every: bounds.Count | str
    """Interval between checkpoints, in steps, or in time, such as 90s, 10m, or 1.5h."""
    keep: bounds.Count
    """Number of newest checkpoints to keep, in addition to the best one, the newest whose step is a
    multiple of checkpoint.every, milestones, and with loop.replay_every the newest up to the last
    equal results."""
    milestones: bounds.Count | None = None
    """Interval between checkpoints that are kept forever, in steps: a multiple of every. None keeps
    none."""
    best_metric: str | None = None
    """Validation metric whose best checkpoint is kept, such as val/psnr. None turns it off."""

    @property
    def every_steps(self) -> int:
        """Returns the interval in steps; 1 if it is a time, since then any step may be saved."""
        return 1 if isinstance(self.every, str) else self.every

    @property
    def every_s(self) -> float | None:
        """Returns the interval in seconds; None if it is in steps."""
        return field_values.duration_s(self.every) if isinstance(self.every, str) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One training run."""

    name: str = ""
    """Name of the run; by default, the name of the config file. The run directory is
    output/NAME/TIME."""
    seed: Annotated[int, bounds.Bounds(least=0, most=2**32 - 1)] = 42
    """Random seed for parameters, example order, augmentation, and masks."""
    precision: Precision = "bfloat16"
    """Precision of the computation; parameters, optimizer state, losses, and metrics stay
    float32."""
    deterministic: bool = False
    """On GPUs, use only deterministic kernels, which are slower. On CPUs, all kernels are
    deterministic."""
    model: Any
    """The model."""
    data: Any
    """The data."""
    optim: Optim
    mesh: Mesh
    loop: Loop
    checkpoint: Checkpoint

    @property
    def microbatch_size(self) -> int:
        """Examples per device and microbatch; with mesh.auto, before the fit, at least one."""
        return max(1, self.data.batch_size // (self.mesh.devices * self.optim.accumulate))

    @property
    def training_model(self) -> Any:
        """Returns the model's config for training batches, whose clips may be smaller.

        ``model`` is that of validations and of everything after training.
        """
        return self.data.training_model(self.model)

    @property
    def validation_scale(self) -> float:
        """Returns how many times larger a validation's example is than one of training."""
        trained, validated = (
            sum(math.prod(array.shape) for array in model.batch_spec(1).values())
            for model in (self.training_model, self.model)
        )
        return validated / trained

    def sent_spec(self, batch_size: int) -> dict[str, Any]:
        """Returns the arrays of a training batch as the workers make them."""
        spec = self.training_model.batch_spec(batch_size)
        return cast(dict[str, Any], self.data.sent(spec, self.model))

    def received(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns the arrays that the model requires, from those of :meth:`sent_spec`."""
        return cast(dict[str, Any], self.data.received(batch, self.model))

    def override(self, changes: Mapping[str, Any]) -> "Run":
        """Returns the run with fields changed, after the checks of the command line.

        Args:
            changes: dotted name -> value, such as ``{"optim.peak_lr": 3e-4}``; see
                :func:`jaxtrain.config.overrides.replaced`.

        Raises:
            InputError: no such field, a value that it does not take, or values that do not fit
                each other.
        """
        with invocation.from_python():
            changed = overrides.replaced(self, changes)
            checks.validate(changed)
        return changed
