"""Computes a teacher's latents for all fixed clips of a config's data, once.

Training with a teacher then uses these clips (data.windows fixed) and never
runs the teacher. To resume after a stop, repeat the command.
"""

import dataclasses
import functools
import json
import os
from typing import TYPE_CHECKING

from jaxtrain import config, terminal
from jaxtrain.cli import command_line, engine_flags
from jaxtrain.errors import InputError
from jaxtrain.storage import atomic
from jaxtrain.storage.disks import disk_trouble

if TYPE_CHECKING:
    from jaxtrain.data.video import latents


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code.

    Raises:
        InputError: wrong use.
    """
    usage = (
        "jaxtrain prepare latents --config NAME --teacher PATH [flags]\n"
        "                                [--section.field VALUE ...]"
    )
    parser = command_line.parser("prepare latents", usage, __doc__)
    add = parser.add_argument
    add(
        "--teacher",
        metavar="PATH",
        help="a checkpoint, a run directory, a weights file, or a folder of diffusers' "
        "autoencoder of CogVideoX, HunyuanVideo, LTX, LTX-2, or Wan",
    )
    add(
        "--teacher-scaling",
        metavar="X",
        type=float,
        help="factor to multiply the latents by (default: from the teacher's folder)",
    )
    add(
        "--teacher-sample",
        metavar="SEED",
        type=int,
        help="sample the latents with this seed (default: their mode)",
    )
    add("--batch", metavar="N", type=int, default=8, help="batch size, in clips (default: 8)")
    engine_flags.add_share(parser)
    engine_flags.add_ray(parser)
    if not arguments or set(arguments) & {"--help", "-h"}:
        parser.print_help()
        return 0
    flags, overrides = command_line.parse(parser, arguments)
    if not flags.teacher:
        raise InputError("--teacher is missing: pass a checkpoint, a weights file, or a folder")
    if flags.batch < 1:
        raise InputError(f"--batch {flags.batch}: use at least 1")
    atomic.check_writable("--json", flags.json)
    run = config.load(flags.config, overrides)
    if not hasattr(run.model, "latent_shape"):
        raise InputError(
            f"--config {flags.config} is not a video autoencoder, so it has no latents"
        )
    return _prepare(run, flags)


def _prepare(run: config.Run, flags: command_line.argparse.Namespace) -> int:
    import jax

    cluster = engine_flags.cluster(flags)
    from jaxtrain.data import cache, worker_count
    from jaxtrain.data.video import files, latents
    from jaxtrain.distributed import process_group
    from jaxtrain.inference import teachers
    from jaxtrain.storage import bucket_output

    for flag, path in (("--data.path", run.data.path), ("--data.val_path", run.data.val_path)):
        if path is not None and files.is_absent(path):  # before the teacher, which may be large
            raise InputError(files.absent(flag, path))
    say = terminal.say
    process_group.check_accelerator(os.environ)  # also for a PyTorch teacher
    load = functools.partial(
        teachers.load,
        flags.teacher,
        scaling=flags.teacher_scaling,
        sample_seed=flags.teacher_sample,
        model=run.model,
    )
    teacher = load(say=say)
    data = dataclasses.replace(run.data, windows="fixed", clips_per_video=1, teacher=None)
    model = dataclasses.replace(run.model, teacher=None)
    devices = jax.device_count()
    batch_size = -(-flags.batch // devices) * devices
    threads = worker_count.cores() if data.workers is None else max(1, data.workers)
    sources = data.open(model, seed=run.seed, say=say)
    say(sources.summary)
    root, bucket = cache.root(data.cache_dir), cache.bucket_of(data.cache_dir)
    target = latents.store(root, run.model, teacher.name, bucket)
    splits = (sources.train, sources.val)
    share = None if cluster is not None else engine_flags.announced_share(flags, target.where)
    url = cache.url(data.cache_dir)
    try:
        with (
            command_line.resumable("latents"),
            bucket_output.admitted(url, say, shared=share is not None),
        ):
            if cluster is not None:
                say(f"encoding on {cluster.where}")
                made = latents.prepare_on_cluster(
                    cluster,
                    splits,
                    functools.partial(load, say=_silent),
                    teacher.about,
                    target,
                    batch_size=flags.batch,
                    threads=data.workers or None,
                    say=say,
                )
            else:
                made = latents.prepare(
                    splits,
                    teacher,
                    target,
                    batch_size=batch_size,
                    threads=threads,
                    say=say,
                    share=share,
                )
    except OSError as error:
        raise disk_trouble(
            error,
            f"cannot write to {target.where}",
            "choose another folder with --data.cache_dir; finished latents are kept",
        ) from error
    if flags.json:
        result = made._asdict() | {"teacher": teacher.name, "folder": target.where}
        atomic.write_whole(flags.json, json.dumps(result, indent=1, default=str) + "\n")
    single = " --data.clips_per_video 1" if run.data.clips_per_video != 1 else ""
    return _report(
        made,
        target.where,
        f"train with --data.windows fixed{single} --data.teacher {teacher.name} "
        "--model.teacher.encoder_weight 0.1",
    )


def _report(made: "latents.Made", where: str, then: str) -> int:
    """Prints which latents exist, and which do not; returns 1 if no video has any.

    If a few videos lack latents, training skips them. A failure would make a cluster start the job
    again, with the same result.
    """
    for one in made.bad[:5]:
        terminal.say(str(one))
    if len(made.bad) > 5:
        terminal.say(f"no latents for clips of {len(made.bad) - 5:,} more videos")
    terminal.say(
        f"latents of {made.videos - made.without:,} videos in {where}, {made.fresh:,} of them new "
        f"({made.windows:,} clips); {then}"
    )
    return 1 if made.bad and made.without == made.videos else 0


def _silent(message: str) -> None:
    """Prints nothing: only this process prints about the teacher."""
