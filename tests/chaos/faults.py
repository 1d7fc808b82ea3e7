"""Plans faults and their moments from a seed."""

import random
from dataclasses import dataclass
from typing import Self

from chaos.damage import DAMAGES

# Kind -> its effect. "one" is one training process, not a data worker.
KINDS = {
    "kill-one": "SIGKILL to one process",
    "kill-all": "SIGKILL to all processes, including workers",
    "kill-tree": "SIGKILL to the launcher and all processes; restarted",
    "term-one": "SIGTERM to one process",
    "term-launcher": "SIGTERM to the launcher; restarted",
    "term-tree": "SIGTERM to the launcher and all processes; restarted",
    "stop": "SIGSTOP to one process of several, never continued",
    "pause": "SIGSTOP to one process, continued after a while",
    "full": "full disk, freed after a while",
    "damage-live": "damaged checkpoint, then SIGKILL to all processes",
    "damage-rest": "damaged checkpoints while the run is down; restarted",
}
# Moments during a start, and those after it.
STARTING = ("start", "data", "restore", "compile", "first step")
RUNNING = ("anywhere", "steps", "evaluation", "save", "commit", "end")
MOMENTS = STARTING + RUNNING
# Faults that always cause a restart soon.
RESTARTING = frozenset(KINDS) - {"pause", "full", "stop"}
# Longest wait inside a phase before the fault, seconds: about the length of the phase here.
_WITHIN_S = {"start": 4.0, "data": 0.5, "restore": 0.5, "compile": 1.5, "first step": 0.3}
_WITHIN_S |= {"steps": 0.1, "evaluation": 0.15, "save": 0.1, "commit": 0.05, "end": 0.5}
_MOST_STEPS_LATER = 9
_LONGEST_FULL_S, _LONGEST_PAUSE_S = 5.0, 8.0


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        target: index of the process, for kinds that hit one process.
        share: fraction of the longest wait inside the phase; for "anywhere", of 70% of an
            undisturbed run's time.
        later: for :data:`RUNNING` moments: minimum number of steps since the last fault.
        lasts_s: duration of a full disk or a pause, seconds.
        damages: damage to the newest checkpoint, the one before it, and so on.
        seed: for further choices, such as the file to damage.
    """

    kind: str
    moment: str
    target: int = 0
    share: float = 0.5
    later: int = 0
    lasts_s: float = 3.0
    damages: tuple[str, ...] = ()
    seed: int = 0

    def within_s(self, undisturbed_s: float) -> float:
        """Seconds from the beginning of the moment to the fault."""
        if self.moment == "anywhere":
            return 0.7 * self.share * undisturbed_s
        return self.share * _WITHIN_S[self.moment]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses ``kind@moment`` or ``kind@moment:process``.

        Raises:
            ValueError: unknown kind or moment.
        """
        kind, _, rest = text.partition("@")
        moment, _, target = rest.partition(":")
        if kind not in KINDS or moment not in MOMENTS:
            raise ValueError(f"{text!r} is not KIND@MOMENT[:PROCESS] of {[*KINDS]} and {MOMENTS}")
        damages = ("flip",) if kind.startswith("damage") else ()
        return cls(kind, moment, int(target or 0), later=2, damages=damages)


@dataclass(frozen=True)
class Plan:
    """One run and its faults.

    Attributes:
        seed: determines the faults and workers.
        workers: data workers per process.
    """

    seed: int
    processes: int
    workers: int
    faults: tuple[Fault, ...]


def plan(seed: int, processes: int) -> Plan:
    rng = random.Random(f"{seed} {processes}")
    faults: list[Fault] = []
    for number in range(rng.randint(3, 5)):
        before = faults[-1] if faults else None
        starts = before is None or (before.kind in RESTARTING and before.moment not in STARTING)
        faults.append(_choose(rng, processes, first=number == 0, starts=starts))
        if faults[-1].moment == "end":
            break
    return Plan(seed, processes, rng.choice((0, 0, 1)), tuple(faults))


def _choose(rng: random.Random, processes: int, *, first: bool, starts: bool) -> Fault:
    kinds = [kind for kind in KINDS if processes > 1 or kind != "stop"]
    moments = [moment for moment in RUNNING if moment != "end" or not first]
    if starts and rng.random() < 0.45:
        unfit = "restore" if first else "data"  # the data is prepared by the first start
        moments = [moment for moment in STARTING if moment != unfit]
    kind, moment = rng.choice(kinds), rng.choice(moments)
    if kind.startswith("damage") and first and moment in STARTING:
        moment = "steps"  # no checkpoint exists yet
    count = rng.choice((1, 1, 1, 2, 3)) if kind.startswith("damage") else 0
    longest_s = _LONGEST_FULL_S if kind == "full" else _LONGEST_PAUSE_S
    return Fault(
        kind=kind,
        moment=moment,
        target=rng.randrange(processes),
        share=rng.random(),
        later=rng.randint(1, _MOST_STEPS_LATER),
        lasts_s=round(rng.uniform(0.5, longest_s), 2),
        damages=tuple(rng.choice(DAMAGES) for _ in range(count)),
        seed=rng.getrandbits(32),
    )
