"""``jaxtrain doctor``: checks whether a run can start here."""

import dataclasses
import os
from typing import Any

from jaxtrain import terminal
from jaxtrain.cli import commands
from jaxtrain.distributed import cluster_env
from jaxtrain.doctor import examination
from jaxtrain.doctor.finding import Finding, summarize
from jaxtrain.errors import InputError
from jaxtrain.jobs.subprocess_worker import exit_on_sigterm
from jaxtrain.storage import addresses, atomic

NOT_READY = 1


@exit_on_sigterm()
def main(flags: commands.Doctor) -> int:
    """Runs the command; returns 0 if a run can start, 1 if there are problems."""
    findings: list[Finding] = []
    about: dict[str, Any] = {}
    heading = ""
    request = dataclasses.asdict(flags) | {"json": None}  # a path is not JSON
    for event in examination.examine(request):
        if isinstance(event, Finding):
            findings.append(event)
            if event.group != heading:
                heading = event.group
                terminal.out(f"\n{heading}")
            terminal.out(addresses.scrub(event.as_text()))
        elif "about" in event:
            about = event["about"]
            terminal.out(f"{about['config']} on {about['host']} (about half a minute)")
    summary = summarize(findings)
    terminal.out(f"\n{summary}")
    ready = all(finding.level != "problem" for finding in findings)
    if flags.json and _writes_the_file():
        report = addresses.scrubbed(
            {
                **about,
                "overrides": list(flags.overrides),
                "ready": ready,
                "verdict": summary,
                "findings": [dataclasses.asdict(finding) for finding in findings],
            }
        )
        atomic.write_json(flags.json, report)
    return 0 if ready else NOT_READY


def _writes_the_file() -> bool:
    """Whether this is process 0 or the only one; all have the same findings."""
    try:
        cluster = cluster_env.find(os.environ)
    except InputError:  # it is among the findings
        return True
    return cluster is None or cluster.index == 0
