"""``jaxtrain prepare latents``: computes a teacher's latents."""

import collections
import dataclasses
import functools
import os

from jaxtrain import config, machine, terminal
from jaxtrain.cli import command_line, commands, job_flags
from jaxtrain.errors import InputError
from jaxtrain.jobs import resumable
from jaxtrain.storage import atomic


def main(flags: commands.PrepareLatents) -> int:
    """Runs the command and returns its exit code."""
    run = config.load(flags.config, flags.overrides)
    if run.model.latent_shape is None:
        raise InputError(
            f"--config {flags.config} has a model that learns from no latents: use a config of the "
            "small video autoencoder, such as taew2_2_h100_1"
        )
    import jax

    cluster, part = job_flags.cluster(flags), job_flags.part(flags)
    from jaxtrain.data.video import encode_latents, files, latents
    from jaxtrain.distributed import process_group
    from jaxtrain.inference import teachers
    from jaxtrain.jobs import engines
    from jaxtrain.storage import cache

    for flag, path in (("--data.path", run.data.path), ("--data.val_path", run.data.val_path)):
        if path is not None and files.is_absent(path):  # before the teacher, which may be large
            raise InputError(files.absent(flag, path))
    say = terminal.say
    process_group.check_accelerator(os.environ)  # also for a PyTorch teacher
    load = functools.partial(teachers.load, flags.teacher, scaling=flags.teacher_scaling)
    teacher = load(say=say)
    teacher.check(f"--teacher {flags.teacher}", run.model, run.model.frames, "--model.frames")
    data = dataclasses.replace(run.data, windows="fixed", clips_per_video=1, teacher=None)
    sources = data.open(dataclasses.replace(run.model, teacher=None), seed=run.seed, say=say)
    say(sources.summary)
    root, url = cache.root(data.cache_dir), cache.url(data.cache_dir)
    devices = 1 if cluster else jax.device_count()
    batch = -(-flags.batch // devices) * devices
    threads = machine.cores() if data.workers is None else max(1, data.workers)
    made = skipped = 0
    failed, totals, folders = dict[str, str](), collections.Counter[str](), list[str]()
    for shape, group in data.latent_groups(run.model, sources.train, sources.val):
        target = latents.store(root, group[0].size, shape, teacher.name, url)
        with command_line.resumable("latents"):
            outcome = encode_latents.prepare(
                group,
                functools.partial(load, say=_silent) if cluster else lambda: teacher,
                teacher.about,
                target,
                engine=cluster or engines.Threads(threads + batch),
                batch_size=batch,
                say=say,
                part=part,
            )
        made, skipped = made + outcome.made, skipped + outcome.skipped
        failed |= outcome.failed
        totals.update(outcome.totals)
        folders.append(target.location)
    windows, lacking = totals["windows"], totals["lacking"]
    locations = " and ".join(folders)
    if lacking:
        say(
            f"{lacking:,} clips cannot be decoded, so they have no latents, and training replaces "
            f"them: the reasons are in {resumable.WORK}/records of {locations}"
        )
    single = " --data.clips_per_video 1" if run.data.clips_per_video != 1 else ""
    say(
        f"latents of {made + skipped:,} videos in {locations}, {made:,} of them new "
        f"({windows:,} clips in total); train with --data.windows fixed{single} --data.teacher "
        f"{teacher.name} --model.teacher.encoder_weight 0.1"
    )
    if flags.json:
        result = {
            "videos": made + skipped,
            "new": made,
            "windows": windows,
            "lacking": lacking,
            "failed": failed,
            "teacher": teacher.name,
            "folders": folders,
        }
        atomic.write_json(flags.json, result)
    # If a few windows lack latents, a repetition would not help.
    return int(bool(failed) or (lacking > 0 and not windows))


def _silent(message: str) -> None:
    """Prints nothing: only this process prints about the teacher."""
