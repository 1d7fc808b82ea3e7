"""``jaxtrain plan``: predicts a run on GPUs."""

import dataclasses
from typing import Any

from jaxtrain import terminal
from jaxtrain.cli import commands
from jaxtrain.data import input_rate
from jaxtrain.jobs.subprocess_worker import exit_on_sigterm
from jaxtrain.planning import report, spot
from jaxtrain.planning.planner import Plan, Planner, check_numbers
from jaxtrain.storage import atomic

DOES_NOT_FIT = 3

_LISTED = 3  # alternatives that fit


@exit_on_sigterm()
def main(flags: commands.Plan) -> int:
    """Runs the command; returns 0 if the run fits, 3 if it does not."""
    host = input_rate.Host(cores=flags.cores, per_core=flags.rate_per_core)
    check_numbers(host, flags.price_per_gpu_hour)
    if flags.spot is not None:
        spot.check(*flags.spot)
    planner = Planner(
        flags.config,
        flags.overrides,
        flags.gpu,
        flags.gpus,
        flags.price_per_gpu_hour,
        host,
        flags.efficiency,
    )
    for line in planner.messages:
        terminal.out(line)
    planner.check_compiler()
    terminal.out("compiling the step (about half a minute) ...")
    plan = planner.plan()
    terminal.out(f"\n{report.text(plan)}")
    content = plan.as_json()
    if flags.spot is not None:
        expected = spot.predict(plan, *flags.spot)
        terminal.out(f"\n{report.on_spot(plan, expected)}")
        content["spot"] = None if expected is None else dataclasses.asdict(expected)
    if flags.json:  # the search may take long
        atomic.write_json(flags.json, content)
    if flags.fit or not plan.fits:
        content["fit"] = _search(planner, plan, flags)
    if flags.json:
        atomic.write_json(flags.json, content)
        terminal.out(f"\nwritten to {flags.json}")
    return 0 if plan.fits else DOES_NOT_FIT


def _search(planner: Planner, plan: Plan, flags: commands.Plan) -> dict[str, Any]:
    scope = "alternatives" if flags.fit else f"alternatives until {_LISTED} fit"
    terminal.out(f"\ncompiling {scope}, for at most {flags.fit_seconds:g} s ...")
    tried, complete = planner.search(plan, flags.fit_seconds, None if flags.fit else _LISTED)
    fitting = [each for each in tried if each.fits]
    listed = tried if flags.fit else fitting[:_LISTED]
    if not complete and (flags.fit or len(fitting) < _LISTED):
        terminal.out(
            f"stopped after {flags.fit_seconds:g} s; raise --fit-seconds to try more alternatives"
        )
    if listed:
        title = (
            "by predicted time"
            if flags.fit
            else "the fastest alternatives that fit, of those tried"
        )
        terminal.out(f"{title}, each compiled; the same global batch:\n{report.ranking(listed)}")
    if not fitting:
        terminal.out(
            "none of them fits: use more GPUs (--gpus 2x8), a GPU with more memory (--gpu), "
            "a smaller global batch, or a smaller model"
        )
    return {"tried": [dataclasses.asdict(each) for each in tried], "complete": complete}
