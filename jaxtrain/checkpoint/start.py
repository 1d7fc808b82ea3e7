"""Decides where a run starts. No other module decides that.

A start is a function of the flags and of what is in the run directory or bucket. ``start.json``
there has the *intent*: what the run was told to start from. It is written when the directory is
locked, before anything slow. It is *spent* once a checkpoint that was saved since is complete: each
has the intent's id in its metadata. So a run that is killed at any moment starts again from what it
was told, or continues its own checkpoints; launchers repeat the same command, or add ``--again``.

=================================  =================================  ============================
flags                              the intent is unspent              it is spent
=================================  =================================  ============================
none                               refused, except for a new run      refused
``--resume latest``, ``--again``   the intent                         the run's newest checkpoint
``--resume PATH`` of another run   the intent if it is the same,      the run's newest checkpoint
                                   else refused
``--resume STEP``                  that step                          goes back to that step again
=================================  =================================  ============================

A directory without a start does what the flags say. All starts of a launch, such as those of a
requeued job, have the same ``$JAXTRAIN_LAUNCH``. It counts as ``--again`` from the first of them on
that is recorded; before, ``--again`` does not change what a step or a path means.

What the words mean: the *newest* is the newest intact checkpoint in ``checkpoints/``, or else in
``best/``; damaged ones are moved to ``aside/``. With only damaged or suspect ones, the run is
refused, and nothing moves. A step or a path is refused if it is missing or damaged; a path may be
that of a checkpoint or of a run, of which it means the newest. :mod:`jaxtrain.checkpoint.same_run`
refuses other data, another seed, and another meaning of the parameters.
"""

import dataclasses
import hashlib
import json
import secrets
from pathlib import Path

from jaxtrain.checkpoint import pointer, resume
from jaxtrain.checkpoint.candidates import CheckpointCandidates, newest_intact
from jaxtrain.checkpoint.own_files import START
from jaxtrain.checkpoint.pointer import BEST, CHECKPOINTS, KINDS
from jaxtrain.checkpoint.store import Place
from jaxtrain.errors import InputError
from jaxtrain.storage import bucket
from jaxtrain.storage.atomic import expanded
from jaxtrain.storage.disks import disk_trouble
from jaxtrain.terminal import Say


@dataclasses.dataclass(frozen=True)
class Intent:
    """What a run was told to start from.

    Attributes:
        kind: ``new``; ``weights``, a new run with ``model.init_from``; ``step``, a checkpoint of
            this run; or ``checkpoint``, one of another run.
        typed: the weights, the step, or the path or URL, as typed, but an absolute path.
        source: the chosen checkpoint: its folder of files in this run, or its path or URL; "" for
            a new run, and until it is chosen.
        digest: of that checkpoint or these weights, which may not change; "" if unknown.
        launch: the value of ``$JAXTRAIN_LAUNCH``; "" without one.
    """

    kind: str
    typed: str = ""
    source: str = ""
    digest: str = ""
    id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    launch: str = ""

    def write(self, place: Place) -> None:
        """Records it in a run directory or bucket.

        Raises:
            InputError, OSError, RunAgain: it cannot be written.
        """
        place.put(START, f"{json.dumps(dataclasses.asdict(self), indent=1)}\n".encode())

    @classmethod
    def read(cls, place: Place) -> "Intent | None":
        """Returns what is recorded; None if nothing is.

        Raises:
            InputError: the record is damaged, or the bucket cannot be read.
            OSError, RunAgain: it cannot be read at the moment.
        """
        content = place.get(START)
        if content is None:
            return None
        try:
            about = json.loads(content)
            return cls(**{field.name: str(about[field.name]) for field in dataclasses.fields(cls)})
        except (ValueError, LookupError, TypeError, RecursionError):
            raise InputError(
                f"{place.location}/{START} is damaged, so it is unknown what this run was started "
                "from: delete it to continue from the newest checkpoint, or choose another "
                "--output-dir"
            ) from None


@dataclasses.dataclass(frozen=True)
class Flags:
    """The flags that a start depends on.

    Attributes:
        init_from: the config's ``model.init_from``, "" if it has none.
        launch: the value of ``$JAXTRAIN_LAUNCH``; "" without one.
    """

    resume: str | None = None
    again: bool = False
    init_from: str = ""
    launch: str = ""


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What a run directory or bucket has of earlier starts.

    Attributes:
        newest: the newest step in ``checkpoints/`` or ``best/``; None if there are no checkpoints.
    """

    intent: Intent | None
    newest: int | None
    spent: bool

    @classmethod
    def of(cls, place: Place, checkpoints: CheckpointCandidates) -> "Recorded":
        """Reads it."""
        intent = Intent.read(place)
        newest = max((step for kind in KINDS for step in checkpoints.steps(kind)), default=None)
        if intent is not None and intent.kind == "step":  # others were there before
            spent = any(
                meta.get("start") == intent.id and "bad_step" not in meta
                for meta in checkpoints.metas()
            )
        else:
            spent = newest is not None or checkpoints.unusable()
        return cls(intent, newest, spent)


def decide(flags: Flags, recorded: Recorded, location: str) -> tuple[Intent | None, str]:
    """Applies the table above, before any checkpoint is read; a pure function.

    Returns:
        The intent of this start, None if it continues its newest checkpoint; and a line to print.
    """
    intent, resume_from = recorded.intent, flags.resume
    requested = _requested(flags, location)
    again = bool(flags.launch and intent and flags.launch == intent.launch)
    if not flags.launch or resume_from in (None, "latest"):
        again |= flags.again  # else the launch's first start has ended before it was recorded
    if intent is None and not recorded.spent:
        note = "--resume latest: no checkpoint to resume from, starting from scratch"
        return requested, note if resume_from == "latest" and not flags.init_from else ""
    if again or resume_from == "latest":
        if recorded.spent or intent is None:
            return None, ""
        return intent, _check_weights(intent, flags, location)
    if resume_from is None:
        if recorded.newest is not None:
            raise InputError(
                f"{location} already contains checkpoints (newest: {recorded.newest}): resume with "
                "--resume latest, or choose another directory"
            )
        if intent is None or intent.kind in ("step", "checkpoint"):
            raise InputError(
                f"{location} was started from {intent.typed if intent else 'a checkpoint'}, and "
                "has no checkpoint of its own: continue with --resume latest, or choose another "
                "directory"
            )
        return requested, ""
    if requested.kind == "step":
        back = (
            f"--resume {resume_from}: going back to step {resume_from} again"
            if recorded.spent
            else ""
        )
        return requested, back if intent and intent.typed == requested.typed else ""
    if recorded.spent:
        newest = "" if recorded.newest is None else f", the newest of which is {recorded.newest}"
        return (
            None,
            f"--resume {resume_from}: {location} continues with its own checkpoints{newest}",
        )
    if intent is not None and intent.kind == "checkpoint":
        names = (intent.typed.removesuffix(".json"), intent.source)
        if requested.typed.removesuffix(".json") in names:
            return intent, ""
    was = "from scratch" if intent is None or not intent.typed else f"from {intent.typed}"
    raise InputError(
        f"--resume {resume_from}: {location} was started {was}, and has not saved a checkpoint "
        "yet: continue that with --resume latest, or choose another directory"
    )


def _requested(flags: Flags, location: str) -> Intent:
    resume_from, launch = flags.resume, flags.launch
    if resume_from is None or resume_from == "latest":
        kind = "weights" if flags.init_from else "new"
        return Intent(kind, flags.init_from, launch=launch)
    if is_step(resume_from):
        return Intent("step", str(int(resume_from)), launch=launch)
    if bucket.is_bucket(resume_from):
        url = bucket.normalized(resume_from, "--resume")
        own = url.removeprefix(f"{location}/").removesuffix(".json")
        if own != url and own.rpartition("/")[0] in KINDS and is_step(own.rpartition("/")[2]):
            return Intent("step", own.rpartition("/")[2], launch=launch)
        return Intent("checkpoint", url, launch=launch)
    path = expanded(resume_from).resolve()  # however it is spelled
    named = pointer.find(path)
    if named is not None and is_in(Path(location), named):
        # Its folder tells it from another one of the same step, such as one in aside/.
        data = pointer.data_of(named.read_bytes())
        return Intent("step", str(pointer.step_in(named.name)), data, launch=launch)
    return Intent("checkpoint", str(path), launch=launch)


def _flag(flags: Flags) -> str:
    return "--again" if flags.resume is None else f"--resume {flags.resume}"


def _check_weights(intent: Intent, flags: Flags, location: str) -> str:
    """Refuses other weights than those of the intent; returns what to print."""
    weights = intent.typed if intent.kind == "weights" else ""
    if intent.kind in ("new", "weights") and flags.init_from not in ("", weights):
        was = f"with model.init_from={weights}" if weights else "from scratch"
        raise InputError(
            f"{location} was started {was}, and has not saved a checkpoint yet, but "
            f"model.init_from is {flags.init_from} now: "
            f"{'pass the same weights' if weights else 'remove it'}, or choose another --output-dir"
        )
    if not intent.typed:
        return f"{_flag(flags)}: no checkpoint to resume from, starting from scratch"
    source = intent.source or intent.typed
    if intent.kind == "step":
        source = f"step {intent.typed}"
    return (
        f"{_flag(flags)}: no checkpoint yet: starting from {source}, from which this run was "
        "started"
    )


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run starts.

    Attributes:
        path: the pointer of the verified checkpoint on this disk; None for a new run.
        display_path: the checkpoint's path in messages; "" for a new run.
        before: what was recorded before this start; None if nothing was.
    """

    intent: Intent
    path: Path | None = None
    display_path: str = ""
    before: Intent | None = None

    def refused(self, place: Place) -> None:
        """Undoes the record of a step to go back to if the run is refused, such as for its data.

        Otherwise, ``--resume latest`` would go back, too.
        """
        if self.intent.kind == "step":
            _restore(self.before, place)


def open_start(
    flags: Flags, place: Place, checkpoints: CheckpointCandidates, cache_root: Path, say: Say
) -> Start:
    """Decides, records the intent before anything slow, and verifies the checkpoint. Process 0.

    Args:
        place: the run directory or bucket, which is locked.

    Raises:
        InputError: refused.
        RunAgain: a disk or bucket does not respond.
    """
    try:
        recorded = Recorded.of(place, checkpoints)
        intent, note = decide(flags, recorded, place.location)
        if note:
            say(note)
        if intent is None:
            path = newest(checkpoints, say, _flag(flags))
            intent = recorded.intent or Intent("new", launch=flags.launch)
            if recorded.intent is None:
                intent.write(place)
            return Start(intent, path, "" if path is None else _display_path(path, place), intent)
        if intent != recorded.intent:
            intent.write(place)  # what is chosen and verified below may take minutes
        try:
            chosen = _chosen(intent, checkpoints, cache_root, say)
        except InputError:
            _restore(recorded.intent, place)
            raise
        if chosen.intent != intent:
            chosen.intent.write(place)
        if chosen.path is not None and not chosen.display_path:
            chosen = dataclasses.replace(chosen, display_path=_display_path(chosen.path, place))
        return dataclasses.replace(chosen, before=recorded.intent)
    except OSError as error:  # the checkpoints may be intact
        raise disk_trouble(
            error,
            f"{_flag(flags)}: {error.filename} cannot be read",
            "make it readable, or choose another --output-dir",
        ) from error


def _restore(before: Intent | None, place: Place) -> None:
    if before is None:
        place.delete(START)
    else:
        before.write(place)


def _chosen(intent: Intent, checkpoints: CheckpointCandidates, cache_root: Path, say: Say) -> Start:
    """Returns the verified checkpoint of an intent, with the intent that names it exactly."""
    if intent.kind == "step":
        path = own_checkpoint(intent, checkpoints)
        data = pointer.data_of(path.read_bytes())
        return Start(dataclasses.replace(intent, source=data), path)
    if intent.kind == "checkpoint":
        flag = f"--resume {intent.source or intent.typed}"
        text = intent.source or intent.typed
        try:
            if bucket.is_bucket(text):
                path, display_path = resume.checkpoint_at_url(text, "--resume", cache_root, say)
            else:
                path = resume.checkpoint_at(Path(text), flag, say)
                display_path = str(path.with_suffix(""))
        except InputError as error:
            if not intent.source:
                raise
            raise InputError(
                f"this run was started from {intent.source}, and has no checkpoint of its own "
                f"yet: {error}; or choose another --output-dir to start from something else"
            ) from error
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if intent.digest not in ("", digest):
            raise InputError(
                f"this run was started from {intent.source}, which is another checkpoint now: "
                "choose another --output-dir to start from that one"
            )
        return Start(
            dataclasses.replace(intent, source=display_path, digest=digest), path, display_path
        )
    return Start(intent)


def newest(checkpoints: CheckpointCandidates, say: Say, flag: str) -> Path | None:
    """Returns the newest intact checkpoint, and moves damaged ones aside; None if there are none.

    Raises:
        InputError: none is intact; nothing moves.
        OSError, RunAgain: it is unknown at the moment.
    """
    start, damaged = newest_intact(checkpoints)
    if start is None:
        if refused := resume.refusal(checkpoints, damaged):
            raise InputError(f"{flag}: {refused}")
        return None
    if checkpoints.bucket_run is None:
        # A validation must not be compared with a best checkpoint that is damaged. From a bucket,
        # this would fetch it.
        damaged |= newest_intact(checkpoints, (BEST,))[1]
    checkpoints.set_aside(damaged)
    display_path = f"{checkpoints.location}/{start.parent.name}/{start.stem}"
    if start.parent.name == BEST:
        say(f"warning: no intact checkpoint in {CHECKPOINTS}/: resuming from {display_path}")
    elif any(kind == CHECKPOINTS for kind, _ in damaged):
        say(f"warning: resuming from {display_path}, the newest intact one in {CHECKPOINTS}/")
    return start


def own_checkpoint(intent: Intent, checkpoints: CheckpointCandidates) -> Path:
    """Returns the checkpoint of an intent in this run.

    Raises:
        InputError: it is missing or damaged.
        OSError, RunAgain: it is unknown at the moment.
    """
    step = int(intent.typed)
    path, why = checkpoints.intact(step, intent.source)
    if path is None:
        others = pointer.format_other_steps({kind: checkpoints.steps(kind) for kind in KINDS}, step)
        raise InputError(
            f"--resume {step}: {checkpoints.location} has no complete checkpoint {step}"
            f"{f' ({why})' if why else ''}; {others}; pass one of these steps, or --resume latest"
        )
    return path


def _display_path(path: Path, place: Place) -> str:
    return f"{place.location}/{path.parent.name}/{path.stem}"


def follow_rollback(place: Place, path: Path) -> None:
    """Makes an unspent intent of a step that of the checkpoint to which a rollback has returned.

    Otherwise a kill before the next save would bring back what the rollback abandoned.
    """
    intent, content = Intent.read(place), pointer.read(path)
    if intent is not None and intent.kind == "step" and content.meta.get("start") != intent.id:
        step = str(content.step)
        dataclasses.replace(intent, typed=step, source=content.data).write(place)


def is_step(text: str) -> bool:
    """Whether the value of ``--resume`` is a step."""
    return text.isascii() and text.isdigit()


def is_in(directory: Path, path: Path | None) -> bool:
    """Whether a checkpoint is in a run directory."""
    return path is not None and directory.resolve() in path.resolve().parents
