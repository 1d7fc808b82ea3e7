"""Measures starts with and without kept kernels, another jax, doctor, and replayed steps.

    python benchmarks/gpu/e_starts_and_versions.py [--python PYTHON] [--minutes 6] [--tiny]

`--python` is an interpreter of an environment with another version of jax. The cold start comes
last, because it takes minutes: the choice of kernels for all convolutions.
"""

import shutil
import sys

import c_changes
import chapter
import tiny

VIDEO = c_changes.STEPS["video, 8 clips"]
REPLAYS = (
    *("gpt_h200_1", "--model.depth", "4", "--data.batch_size", "8", "--data.demo", "True"),
    *("--model.sequence_length", "512", "--loop.steps", "400"),
)
_REPLAYED = (
    *("--deterministic", "True", "--loop.replay_every", "5", "--checkpoint.best_metric", "None"),
    *("--loop.epochs", "None", "--loop.tokens_per_param", "None", "--loop.eval_every", "None"),
)
_TINY_REPLAYS = ("gpt_h200_1", *tiny.GPT, "--data.demo", "True", "--loop.steps", "10")


def main() -> None:
    """Runs the chapter."""
    parser = chapter.flags(__doc__)
    parser.add_argument("--python", help="an interpreter with another jax")
    flags = parser.parse_args()
    one = chapter.Chapter(flags)
    name, *typed = c_changes.TINY["video, 8 clips"] if flags.tiny else VIDEO
    one.steps("video, 8 clips, this jax", name, typed)
    if flags.python or flags.tiny:
        python = flags.python or sys.executable
        one.steps("video, 8 clips, the other jax", name, typed, python=python)
    autotuned = one.work / "autotuned"
    shutil.rmtree(autotuned, ignore_errors=True)
    stored = one.compiled / chapter.AUTOTUNE
    if stored.is_dir():
        shutil.copytree(stored, autotuned / chapter.AUTOTUNE)
    what = "first step of the video with kept kernels, without compiled programs"
    one.steps(what, name, typed, measurements=(), compiled=autotuned)
    doctor(one, name, typed)
    replays(one, flags.tiny)
    cold = one.work / "cold"
    shutil.rmtree(cold, ignore_errors=True)
    one.steps("first step of the video, cold", name, typed, measurements=(), compiled=cold)


def doctor(one: chapter.Chapter, name: str, typed: list[str]) -> None:
    """Checks the machine."""
    if one.begins("doctor"):
        lines = one.command("doctor", name, *typed, at_most_s=60.0).strip().splitlines()
        problems = [line.strip() for line in lines if line.lstrip().startswith(("FAIL", "WARN"))]
        result = " / ".join([*problems[:4], *lines[-1:]])
        one.row("doctor", result, f"jaxtrain doctor {name}, on one GPU")


def replays(one: chapter.Chapter, small: bool) -> None:
    """Trains with every fifth step computed twice."""
    if one.begins("replayed steps"):
        run = one.work / "replayed"
        shutil.rmtree(run, ignore_errors=True)
        words = _TINY_REPLAYS if small else REPLAYS
        words = (*words, *_REPLAYED)
        output = one.command("train", *words, "--output-dir", str(run), at_most_s=120.0)
        steps = max(chapter.records(run), default=0)
        result = f"{steps} steps, every fifth computed twice: none differs, or the run would end"
        if "exit code" in chapter.last(output):
            result = f"failed after step {steps}: {chapter.last(output)}"
        one.row("replayed steps", result, "jaxtrain train " + " ".join(words))


if __name__ == "__main__":
    main()
