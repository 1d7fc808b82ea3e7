"""The training loop: takes a batch, runs a step, records, validates, saves, stops."""

import jax

from jaxtrain.training.run_progress import is_due
from jaxtrain.training.save_policy import patience_over
from jaxtrain.training.setup import TrainSetup
from jaxtrain.training.state import State


def train(setup: TrainSetup) -> None:
    """Trains until the run has all its steps or stops early, and saves the last state.

    ``setup.batches`` yields batches (:mod:`jaxtrain.data.pipeline`); ``setup.step`` is the compiled
    function of :func:`jaxtrain.training.step.build_train_step`.

    Raises:
        InputError: ``optim.bad_updates`` stops the run at a bad step, or rollbacks did not help;
            the first bad step with NaN/Inf is saved.
        RunAgain: the state cannot be saved, or a replay found that it is wrong.
    """
    run, total, recorder, save_policy = setup.run, setup.total, setup.recorder, setup.save_policy
    state, stopping = setup.take_state(), setup.stopping
    save_interval = None if run.checkpoint.every_s else run.checkpoint.every_steps
    if save_policy.run_progress.validation_due and _validate(setup, state):
        with recorder.paused_for("save"):
            save_policy.save(recorder.position(), state, regular=False, best=True)
    while not (
        stopping.decision
        or patience_over(run.loop, save_policy.run_progress)
        or recorder.finished()
    ):
        if recorder.too_many_bad():
            state = _roll_back(setup, state)
        setup.before_step(recorder.step, state)

        batch, scalars = next(setup.batches), setup.schedule.scalars(recorder.step)
        with recorder.on_devices():  # on CPUs, the call may return only after the step
            if setup.replay and is_due(recorder.step + 1, run.loop.replay_every, total):
                state, metrics = setup.replay(recorder.step, state, batch, scalars)
            else:
                state, metrics = setup.step(state, batch, scalars)
        # Fetches and records the metrics of the previous step while the device computes this one.
        recorder.push(metrics, setup.batches.ids, state, batch)

        validates = setup.evaluator and is_due(recorder.step, run.loop.eval_every, total)
        saves = stopping.save_due or is_due(recorder.step, save_interval, total)
        if (validates or saves) and recorder.last_step_was_good():
            best = bool(validates) and _validate(setup, state)
            # A validation that a stop has interrupted is not judged: finish() saves.
            if (saves or best) and not save_policy.run_progress.validation_due:
                with recorder.paused_for("save"):
                    save_policy.save(recorder.position(), state, regular=saves, best=best)
                stopping.save_due = False
        with recorder.on_devices():
            stopping.after_step()
    stopping.no_more_steps()
    recorder.flush()
    setup.log.phases.ending()
    jax.block_until_ready(state)  # no device uses the last batch any longer
    setup.batches.close()
    with recorder.paused_for("save"):
        save_policy.finish(recorder.position(), state)


def _validate(setup: TrainSetup, state: State) -> bool:
    """Validates a state; returns whether it is the best so far.

    A stop may interrupt it; the resumed run then begins with this validation.
    """
    recorder, save_policy = setup.recorder, setup.save_policy
    assert setup.evaluator is not None, "only runs with validation reach this"
    with recorder.paused_for("compile"):
        setup.evaluator.ensure_compiled(setup.stopping)
    with recorder.paused_for("evaluation", allowance_s=0.0):  # for each batch
        validation = setup.evaluator(state, setup.stopping, setup.still_alive)
        save_policy.run_progress.validation_due = validation is None
        if validation is None:
            return False
        recorder.validated(recorder.step, validation)
        is_best = save_policy.judge(recorder.position(), validation.values)
        why = setup.canaries.judge(state, validation, save_policy.run_progress)
        if why:
            setup.stopping.end(why)
        return is_best


def _roll_back(setup: TrainSetup, state: State) -> State:
    with setup.recorder.paused_for("rollback"):
        setup.save_policy.await_save()
        state, position = setup.rollback(state, setup.still_alive)
        setup.recorder.rewind(position)
    return state
