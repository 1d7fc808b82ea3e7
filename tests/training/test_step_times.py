"""What a process does in each step, and which process delays the others."""

from jaxtrain.training.step_times import Seconds, Slow, StepTimes, slowest

QUICK = Seconds(0.001, 0.01, 0.0, 1.0)


def test_the_process_that_starts_its_steps_late_is_slow() -> None:
    input_ = QUICK._replace(input=0.4)
    program = QUICK._replace(program=0.6)
    assert slowest([QUICK, QUICK, QUICK]) is None
    assert slowest([QUICK, input_, QUICK]) == Slow(1, "input", 0.4, 0.001)
    assert slowest([program, QUICK]) == Slow(0, "program", 0.6, 0.01)
    assert slowest([input_, QUICK, program, QUICK]) == Slow(2, "program", 0.6, 0.01)  # the worst


def test_a_process_that_delays_no_others_is_not_slow() -> None:
    # All wait for the same storage.
    assert slowest([QUICK._replace(input=0.5), QUICK._replace(input=0.55)]) is None
    # Milliseconds of a tiny step.
    tiny = Seconds(0.0, 0.0, 0.0, 0.1)
    assert slowest([tiny, tiny._replace(input=0.02, program=0.02)]) is None
    # One waits for its input while the other one works.
    assert slowest([QUICK._replace(input=0.5), QUICK._replace(program=0.5)]) is None
    # The device had a step to compute meanwhile, for which the process then waited.
    assert slowest([QUICK, QUICK._replace(program=0.6, ahead=0.3)]) is None


def test_a_process_that_its_cpu_limit_stops_is_slow() -> None:
    limited = QUICK._replace(limited=0.5, program=0.6)
    assert slowest([QUICK, limited]) == Slow(1, "CPU limit", 0.5, 0.0)
    # All have the same limit.
    assert slowest([QUICK._replace(limited=0.5), QUICK._replace(limited=0.58)]) is None
    # GPUs had a step to compute meanwhile; CPUs computed it within the limit.
    ahead = QUICK._replace(limited=0.5, ahead=0.4)
    assert slowest([QUICK, ahead]) is None
    assert slowest([QUICK, ahead], on_cpu=True) == Slow(1, "CPU limit", 0.5, 0.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_medians_of_steps_ignore_pauses_and_single_late_steps() -> None:
    clock = Clock()
    times = StepTimes(clock)

    def step(program_s: float, input_s: float = 0.25) -> None:
        for what, seconds in (("devices", 2.0), ("pause", 8.0), ("ahead", 0.5)):
            with times.inside(what):
                clock.now += seconds
        clock.now += input_s + program_s
        times.stepped(input_s)

    step(64.0)
    times.forget()
    for program_s in (0.125, 32.0, 0.125, 32.0):
        step(program_s)
    assert times.medians() is None  # too few steps
    step(0.125)
    assert times.medians() == Seconds(0.25, 0.125, 0.5, 2.875)
    assert times.medians() is None  # each step counts once
