"""What can be typed: a dataclass per command, as :mod:`jaxtrain.cli.flags` parses it.

It imports nothing heavy, so that help and wrong use need no jax.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from jaxtrain.config.bounds import Bounds
from jaxtrain.config.run_flags import UNTYPED

_ONE = Bounds(least=1)
_Source = Annotated[Path, "SOURCE"]
_In = Annotated[Path, "IN"]
_Out = Annotated[Path, "OUT"]
_File = Annotated[Path | None, "FILE"]
_Number = Annotated[int, "N", _ONE]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A command."""

    module: ClassVar[str] = ""
    """The file of jaxtrain.cli that runs it, if it does not have the command's first word."""
    usages: ClassVar[tuple[str, ...]] = ()
    """Ways to type it; () for all positional arguments and required flags."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Json(Command):
    """A command that prints results."""

    json: _File = None
    """also write the results to FILE, as JSON"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfModel(Command):
    """A command about a trained model."""

    config: Annotated[str | None, "FILE.py"] = None
    """the config that it was trained with; only for your own model, which this file defines or
    imports"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precise(OfModel):
    """A command that computes with a trained model."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """precision of the computation; bfloat16 is faster on GPUs"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfConfig(Command):
    """A command about a config, whose fields can be set."""

    takes_run_flags: ClassVar[bool] = False
    """Whether it ignores the other flags of a run, so that a run's arguments can be pasted."""

    config: Annotated[str, "NAME"] = ""
    """a shipped config, or the path of a .py file"""
    overrides: tuple[str, ...] = dataclasses.field(default=(), metadata=UNTYPED)
    arguments: tuple[str, ...] = dataclasses.field(default=(), metadata=UNTYPED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine(Command):
    """A command whose work can run on a Ray cluster."""

    engine: Literal["local", "ray"] = "local"
    """run here, or on a Ray cluster"""
    ray_address: Annotated[str | None, "ADDR"] = None
    """HOST:PORT of the cluster, or local to start one here (default: $RAY_ADDRESS, or this
    machine's cluster)"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts(Command):
    """A command that can do a part of its work."""

    part: Annotated[str | None, "I/N"] = None
    """do only the part I, from 0, of N equal ones; tasks of srun and of a SLURM array set it
    themselves (default: everything)"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InProcesses(Engine, Parts):
    """A command whose work runs in processes."""

    workers: Annotated[int | None, "N", _ONE] = None
    """worker processes (default: as many as CPUs, also of a Ray cluster)"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnDevices(Engine):
    """A command whose work runs a model."""

    ray_gpus: Annotated[float | None, "X", Bounds(least=0)] = None
    """GPUs per Ray worker, such as 0.25 (default: 1, or 0 if there are none)"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folder(OnDevices, Parts, Precise):
    """A command that processes a video, or a folder on all devices."""

    workers: Annotated[int | None, "N", Bounds(least=1, most=1024)] = None
    """files processed at once, also by each Ray worker (default: based on cores and memory)"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writes(Command):
    """A command that writes videos."""

    crf: Annotated[int, "N", Bounds(least=0, most=51)] = 16
    """H.264 quality, from 0 (lossless) to 51 (worst)"""


@dataclasses.dataclass(frozen=True)
class Generate(Precise):
    """Completes a text with a causal language model, and prints it token by token.

    SOURCE is a checkpoint, a run directory or s3://BUCKET/PATH (best or else newest checkpoint), a
    folder with weights and a tokenizer.json, or hf:ORG/MODEL on the Hub. A completion ends after
    --tokens tokens, or at the end of the document. Once the text is longer than the model's context
    window, the model repeatedly restarts with the last half of the window (a note is printed).
    """

    module = "text"

    source: Annotated[Path | None, "SOURCE"]
    """a causal language model (default: the newest run in output/ that has one)"""
    text: str
    """the prompt: how the text begins"""
    _: dataclasses.KW_ONLY
    tokens: Annotated[int, "N"] = 200
    """maximum number of tokens to generate"""
    temperature: Annotated[float, "T"] = 0.8
    """sampling temperature; 0 always picks the most likely token"""
    top_k: Annotated[int | None, "K"] = None
    """sample from the K most likely tokens (default: all)"""
    top_p: Annotated[float | None, "P"] = None
    """sample from the fewest tokens with total probability P, 0 to 1 (default: all)"""
    seed: Annotated[int, "N"] = 0
    """random seed of the sampling (default: 0)"""
    samples: Annotated[int, "N"] = 1
    """number of completions"""


@dataclasses.dataclass(frozen=True)
class Fill(Precise):
    """Prints the most likely tokens for each [MASK] of a text, with their probabilities.

    SOURCE is a checkpoint, a run directory or s3://BUCKET/PATH (best or else newest checkpoint), a
    transformers folder (BertForMaskedLM, ModernBertForMaskedLM), or hf:ORG/MODEL on the Hub. Each
    mask is filled while the others stay masked.
    """

    module = "text"
    usages = ('fill SOURCE "Paris is the [MASK] of France." [flags]',)

    source: _Source
    """a masked language model"""
    text: str
    """a text with [MASK] where you want a prediction"""
    _: dataclasses.KW_ONLY
    top: Annotated[int, "N"] = 5
    """number of tokens per mask"""


@dataclasses.dataclass(frozen=True)
class Encode(Folder):
    """Encodes a video, or all videos in a folder, to latents.

    SOURCE is a checkpoint, a run directory, a weights file, s3://BUCKET/PATH, or hf:ORG/MODEL. The
    file also stores the model and the video's size, frame count, padding, and average frame rate,
    for jaxtrain decode. A folder is encoded on all devices, to a folder with report.json; to
    resume, repeat the command.
    """

    module = "video"

    source: _Source
    """the autoencoder"""
    video: _In
    """the video, or a folder"""
    target: _Out
    """the file or folder to write"""
    _: dataclasses.KW_ONLY
    layout: Annotated[Literal["lhwc", "ncthw", "ntchw", "comfyui"], "NAME"] = "lhwc"
    """lhwc, ncthw (diffusers), ntchw (its CogVideoX), or comfyui"""
    scale: Annotated[str, "X"] = "1"
    """multiply channels by X, or by X,X,..."""
    shift: Annotated[str, "X"] = "0"
    """add X, or X,X,..., after --scale"""
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], "TYPE"] = "float32"
    """float32, bfloat16, or float16"""


@dataclasses.dataclass(frozen=True)
class Decode(Folder, Writes):
    """Decodes latents from jaxtrain encode, a file or a folder, to videos.

    SOURCE is a checkpoint, a run directory, a weights file, s3://BUCKET/PATH, or hf:ORG/MODEL: the
    model that encoded the video, or one with the same latents. The video has the average frame rate
    of the original, and no sound. For a folder, OUT is a folder with report.json. To resume, repeat
    the command.
    """

    module = "video"

    source: _Source
    """the autoencoder: a checkpoint, run, weights file, or hf:ORG/MODEL"""
    latents: _In
    """latents from jaxtrain encode, or a folder of them"""
    target: _Out
    """the video or folder to write"""


@dataclasses.dataclass(frozen=True)
class Reconstruct(Writes, Precise):
    """Encodes and decodes a video of any length, with only a few frames in memory.

    SOURCE is a checkpoint, a run directory, a weights file, a run in a bucket (s3://BUCKET/PATH),
    or hf:ORG/MODEL on the Hugging Face Hub. The result has the frames, timestamps, and size of the
    original; the audio is copied unchanged.
    """

    module = "video"

    source: _Source
    """the autoencoder: a checkpoint, run, weights file, or hf:ORG/MODEL"""
    video: _In
    """the video to reconstruct"""
    target: Annotated[Path, "OUT.mp4"]
    """the video to write"""
    _: dataclasses.KW_ONLY
    side_by_side: bool = False
    """put the original on the left, and labels above both"""
    no_audio: bool = False
    """do not copy the audio"""


@dataclasses.dataclass(frozen=True)
class Evaluate(Json, Precise):
    """Measures the quality of one to three video autoencoders, or of a language model.

    SOURCE is a checkpoint, a run directory (its best checkpoint, else its newest), a weights file,
    s3://BUCKET/PATH, or hf:ORG/MODEL on the Hub. Autoencoders reconstruct the same clips, the
    middle of each video, and each frame is compared with its original. --protocol measures as
    published, and prints the published results beside it. --teacher combines the encoders and
    decoders of a student and of its teacher, and says how much of the teacher is kept.

    A masked language model gives pseudo-perplexity: each token is masked in turn and predicted from
    the tokens around it; unknown tokens ([UNK]) are skipped. A causal model gives bits per byte:
    each token is predicted from at least half a context window of tokens before it, where the text
    has as many. On the folder of CORE's tasks, it gives the accuracy of each task and CORE. On the
    folder of BLiMP's pairs of sentences, both kinds give the fraction of pairs whose acceptable
    sentence is the more probable one, with published results beside it. These folders are not part
    of jaxtrain. The flags are --text-field, --max-tokens, --max-examples, and --rows.
    """

    sources: Annotated[tuple[Path, ...], "SOURCE"]
    """a model; differences between two or three autoencoders are tested for significance"""
    _: dataclasses.KW_ONLY
    data: Annotated[str, "PATH"]
    """the videos: a folder, a video, or a list; or the text, UTF-8: a .txt or .md file is one
    document, each line of a .jsonl file and each row of a .parquet file another; or a folder with
    the tasks of CORE (core.yaml, eval_data/, eval_meta_data.csv) or the .jsonl files of BLiMP"""
    split: Literal["val", "all"] = "val"
    """val: of data that a SOURCE was trained on, only the part for validation; all: all videos, as
    always with --protocol"""
    protocol: Annotated[str | None, "NAME"] = None
    """measure as published: mcl-jcv or open-sora-plan; it determines the clips"""
    frames: Annotated[int | None, "N", _ONE] = None
    """frames per clip (default: 16)"""
    height: Annotated[int | None, "N", _ONE] = None
    """clip height, pixels (default: 256)"""
    width: Annotated[int | None, "N", _ONE] = None
    """clip width, pixels (default: 256)"""
    clips: Annotated[int | None, "N", _ONE] = None
    """total number of clips, spread evenly over the videos (default: one per video)"""
    lpips: _File = None
    """also measure LPIPS, with this complete state dict of lpips.LPIPS, by AlexNet (net='alex') or
    VGG16 (net='vgg')"""
    i3d: _File = None
    """also measure rFVD, the Fréchet video distance to the originals, with this state dict of
    pytorch-i3d's InceptionI3d(400)"""
    teacher: Annotated[str | None, "PATH"] = None
    """the autoencoder whose latents SOURCE was trained on: a checkpoint, a run directory, a weights
    file, a folder of diffusers, or one with TAESD's NAME_encoder and NAME_decoder"""
    teacher_scaling: Annotated[float | None, "X"] = None
    """factor to multiply the teacher's latents by, as in prepare latents (default: from its folder)
    """
    report: Annotated[Path | None, "FILE.html"] = None
    """with --teacher: also write a page with all tables and images"""
    worst: Annotated[Path | None, "DIR"] = None
    """also write images of the three clips with the lowest PSNR to this folder, new or empty:
    original, reconstruction, and error"""
    text_field: Annotated[str | None, "NAME"] = None
    """text: field of .jsonl objects or column of .parquet files with it (default: the first of
    text, content, body, ...)"""
    max_tokens: Annotated[int | None, "N", _ONE] = None
    """text: measure only the first N tokens, and read only as much (default: all)"""
    max_examples: Annotated[int | None, "N", _ONE] = None
    """CORE, BLiMP: measure only N examples of each task, or N pairs of each file (default: all)"""
    rows: Annotated[int | None, "N", _ONE] = None
    """text: batch size, in sequences (default: 16)"""


@dataclasses.dataclass(frozen=True)
class Export(OfModel):
    """Exports weights, with the names and layout of the model's original implementation.

    SOURCE is a checkpoint, a run directory or s3://BUCKET/PATH (best or else newest checkpoint), a
    weights file that jaxtrain wrote, or hf:ORG/MODEL on the Hub. A .pth file requires PyTorch.
    --format hf writes a folder, with a model card, that from_pretrained of transformers (with the
    tokenizer) or, for wan_vae, of diffusers loads. --format comfyui writes float16 for ComfyUI and
    stable-diffusion.cpp, and refuses a model that ComfyUI does not have; OUT may be its folder
    models/vae_approx.

    What is written is read back and must be equal, and transformers or diffusers, if installed,
    must compute the same from its folder. The model card states these checks.

    --push uploads such a folder to the Hugging Face Hub instead. For a model that transformers does
    not support, it uploads one weights file and a model card. Run hf auth login first, or set
    HF_TOKEN. An existing model card is kept.
    """

    module = "weights"
    usages = (
        "export SOURCE OUT.safetensors|OUT.pth",
        "export SOURCE OUT.safetensors|DIR --format comfyui",
        "export SOURCE DIR --format hf [--license NAME]",
        "export SOURCE --push ORG/MODEL [--private] [--license NAME]",
    )

    source: _Source
    """the model to export"""
    target: Annotated[Path | None, "OUT"]
    """the file or folder to write"""
    _: dataclasses.KW_ONLY
    format: Literal["file", "hf", "comfyui"] | None = None
    """file: one weights file; comfyui: one for ComfyUI; hf: a folder for transformers or diffusers
    (default: file; with --push: hf if one of them supports the model)"""
    push: Annotated[str | None, "ORG/MODEL"] = None
    """upload to this repository on the Hugging Face Hub; it is created if missing"""
    private: bool = False
    """with --push: the repository must be private"""
    license: Annotated[str | None, "NAME"] = None
    """license to name in the model card, such as apache-2.0 (default: none)"""


@dataclasses.dataclass(frozen=True)
class Import(Command):
    """Imports published weights: checks names and shapes, and prints which model they belong to.

    OUT also stores the config of the model, so that all commands and --model.init_from accept it.
    Reading a .pth file requires PyTorch.

    DIR is a transformers folder (BertForMaskedLM, ModernBertForMaskedLM, LlamaForCausalLM, or
    NanoChatForCausalLM) with the tokenizer, or such a model on the Hugging Face Hub:
    hf:ORG/MODEL[@REVISION]. OUT is then also a folder, without the pooler and the next-sentence
    head of BertForPreTraining. hf:ORG/MODEL:FILE is a weights file on the Hub.
    """

    module = "weights"
    usages = (
        "import IN.pth|IN.safetensors OUT.safetensors [--trim RULE]",
        "import DIR OUT",
    )

    source: _In
    """the published weights"""
    target: _Out
    """the file or folder to write"""
    _: dataclasses.KW_ONLY
    trim: Annotated[Literal["always", "odd_latents", "h3"] | None, "RULE"] = None
    """which frames to drop: always (Hunyuan, Wan, LTX), odd_latents (CogVideoX), or h3 (MiniMax
    H3); only needed if neither the shapes nor the file name, such as taehv.pth, decides"""


@dataclasses.dataclass(frozen=True)
class PrepareClips(InProcesses):
    """Cuts videos into pieces at training size, which is what training reads.

    A run does it itself at its start if that takes less than half an hour. To resume after a stop,
    repeat the command.
    """

    module = "prepare.clips"

    source: Annotated[str, "SOURCE"]
    """the original videos, as --data.path accepts them"""
    out: Annotated[str, "OUT"]
    """folder of the pieces, to be used as --data.path; may be s3://BUCKET/PATH or
    gs://BUCKET/PATH"""
    _: dataclasses.KW_ONLY
    height: Annotated[int, "N"] = 480
    """height of a training clip, pixels"""
    width: Annotated[int, "N"] = 720
    """width of a training clip, pixels"""
    min_crop_scale: Annotated[float, "X"] = 0.8
    """smallest data.min_crop_scale that the pieces are large enough for"""
    frames: Annotated[int, "N"] = 96
    """frames per piece; the last one of a shot has up to --min-frames - 1 more"""
    min_frames: Annotated[int, "N"] = 24
    """minimum frames per piece; shorter ones are dropped"""
    min_side: Annotated[int, "N"] = 64
    """minimum length of a video's shorter side, pixels; smaller videos are dropped"""
    gop: Annotated[int, "N"] = 8
    """frames between keyframes"""
    quantizer: Annotated[int, "N"] = 2
    """MPEG-4 quality, from 1 (best) to 31"""
    keep_cuts: bool = False
    """do not split at hard cuts"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareTokens(OfConfig, InProcesses, Json):
    """Prepares the tokenizer, tokens, and examples of a text config, before you rent GPUs.

    It does what a run does when it starts: it downloads Hugging Face datasets, trains a tokenizer,
    tokenizes the text on all cores, and lays out its sequences. A run with the same settings then
    starts at once. To resume after a stop, repeat the command.
    """

    module = "prepare.tokens"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareSets(Command):
    """Lists the sets of pieces that runs have cut into the cache, and deletes old ones.

    A run whose videos no complete set in the cache was made of cuts them again.
    """

    module = "prepare.sets"

    cache_dir: Annotated[str | None, "DIR"] = None
    """the cache (default: $JAXTRAIN_CACHE, or else ~/.cache/jaxtrain)"""
    prune: Annotated[int | None, "DAYS"] = None
    """delete the sets that no run has opened for so many days, longer than a run trains"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareLatents(OfConfig, OnDevices, Parts, Json):
    """Computes a teacher's latents for all fixed clips of a config's data, once.

    With data.crop, it encodes data.crops_per_clip random crops of each training clip. Training with
    a teacher then uses these clips (data.windows fixed) and never runs the teacher. To resume after
    a stop, repeat the command.
    """

    module = "prepare.latents"

    teacher: Annotated[str, "PATH"]
    """a checkpoint, a run directory, a weights file, a folder of diffusers' autoencoder of
    CogVideoX, FLUX.2, HunyuanImage, HunyuanVideo (1.5), LTX, LTX-2, MiniMax H3, Qwen-Image (2.1),
    or Wan, or one with TAESD's NAME_encoder and NAME_decoder
    """
    teacher_scaling: Annotated[float | None, "X"] = None
    """factor to multiply the latents by (default: from the teacher's folder)"""
    batch: _Number = 8
    """batch size, in clips"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(OfConfig, Json):
    """Predicts the memory, communication, time, and cost of a config on GPUs, without GPUs."""

    takes_run_flags = True

    gpu: Annotated[str | None, "GPU"] = None
    """a10, a10g, a40, a6000, a100-40gb, a100-pcie, a100, a800-pcie, a800, h100-pcie, h100-nvl,
    h100, h200-nvl, h200, gh200, b200, l4, l40s, rtx4090, rtx5090, or a .json file that describes
    another (default: from the config's name)"""
    gpus: Annotated[str | None, "2x8"] = None
    """nodes x GPUs per node (default: the config's mesh in nodes of 8)"""
    fit: bool = False
    """compile alternatives with the same global batch and rank them"""
    fit_seconds: Annotated[float, "S", Bounds(above=0, most=7 * 24 * 3600)] = 300.0
    """time limit of --fit in seconds; an alternative takes about 30 (default: 300)"""
    cores: Annotated[int | None, "N"] = None
    """CPU cores (vCPUs) of each node, which load the data (default: 12 per GPU)"""
    rate_per_core: Annotated[float | None, "R"] = None
    """examples/s that a core loads, such as the rate of the loader that doctor measures, divided by
    its workers (default: recorded rates)"""
    efficiency: _File = None
    """predict times with the fraction of the serial bound that bench --efficiency FILE measured on
    the same kind of GPU"""
    price_per_gpu_hour: Annotated[float | None, "P"] = None
    """price in any currency; adds the cost"""
    spot: Annotated[tuple[float, float] | None, "P N"] = None
    """also on spot machines, at this price per GPU-hour and with so many preemptions a day: hours,
    cost, and how often to save"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doctor(OfConfig, Json):
    """Checks whether this machine, cluster, and data are ready for a config."""

    takes_run_flags = True

    output_dir: Annotated[str | None, "DIR"] = None
    """run directory of the run (default: output/NAME)"""
    resume: Annotated[str | None, "latest|STEP|PATH"] = None
    """same as for the run; a resumed run ignores model.init_from"""
    simulate_devices: Annotated[int | None, "N", _ONE] = None
    """check a run on N virtual CPU devices"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench(OfConfig, Json):
    """Measures how fast a config starts, steps, loads data, and saves, on this machine."""

    takes_run_flags = True

    # Twice this, and what else is measured, ends within the time limit.
    seconds: Annotated[float, "S", Bounds(above=0, most=1200)] = 20.0
    """seconds to measure steps, and again to measure the pipeline (default: 20)"""
    simulate_devices: Annotated[int | None, "N"] = None
    """measure on N virtual CPU devices"""
    efficiency: _File = None
    """write the measured fraction of the step's serial bound to FILE, for plan --efficiency"""


@dataclasses.dataclass(frozen=True)
class Compare(OfConfig, Json):
    """Tells whether a change is better, by pairs of runs that share their seed.

    After each pair it prints the difference with an interval that is valid at every look, and it
    stops at a verdict: better, worse, equivalent (with --practical), identical to the bit, or
    diverged. No verdict of a difference is possible before the sixth pair, with several changes
    later. --section.field VALUE changes all sides. To continue after a stop, repeat the command:
    runs are used again as long as their code and data stay the same. Runs that exist are compared
    in pairs, with equal seeds. The exit code says the verdict.
    """

    usages = (
        'compare NAME --change "--section.field VALUE ..." [flags] [--section.field VALUE ...]',
        "compare NAME --change-code REV [flags] [--section.field VALUE ...]",
        "compare NAME_A NAME_B [flags] [--section.field VALUE ...]",
        "compare RUN_A RUN_B [RUN_A RUN_B ...] [flags]",
    )

    others: Annotated[tuple[str, ...], "B"] = ()
    """the other config; or more run directories"""
    _: dataclasses.KW_ONLY
    change: Annotated[tuple[str, ...], "FIELDS"] = ()
    """fields that side b changes, in quotes: "--optim.peak_lr 2e-3"; repeat it for further changes,
    each a side of its own: they share the runs of a"""
    change_code: Annotated[tuple[str, ...], "REV"] = ()
    """side b trains with the code of this commit of the checkout that has the config; repeat it for
    further ones"""
    metric: Annotated[str | None, "NAME"] = None
    """metric of the last validation (default: checkpoint.best_metric)"""
    practical: Annotated[float | None, "D", Bounds(above=0)] = None
    """a difference smaller than D does not matter: below it, the sides are equivalent"""
    at: Literal["steps", "flops"] = "steps"
    """what the sides have in common: the number of steps; or flops, as counted for a step, from
    which the steps of b follow (default: steps)"""
    fit_time: Annotated[str | None, "TIME"] = None
    """the steps of each side follow from the time that it may train, such as 5m, and from that of a
    step, which is measured once on this machine"""
    pairs: Annotated[int, "N", _ONE] = 20
    """maximum number of pairs (default: 20)"""
    hours: Annotated[float | None, "H", Bounds(above=0)] = None
    """begin no pair after H hours of training; with several devices, those ahead continue"""
    output_dir: Annotated[Path | None, "DIR"] = None
    """folder of the results (default: output/compare/NAME-ID)"""
    runs: Annotated[Path | None, "DIR"] = None
    """folder of the runs; comparisons with the same one share equal runs (default: runs in the
    folder of the results)"""
    keep_checkpoints: bool = False
    """keep the checkpoints of runs that are judged (default: they are deleted)"""
    simulate_devices: Annotated[int | None, "N", _ONE] = None
    """run on N virtual CPU devices"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigsList(Command):
    """Lists the shipped configs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigsShow(OfConfig):
    """Shows every field of a config: a shipped one, or the path of a .py file."""


@dataclasses.dataclass(frozen=True)
class ConfigsDiff(Command):
    """Shows how two configs differ, which are shipped or the paths of .py files."""

    before: Annotated[str, "A"]
    """a config"""
    after: Annotated[str, "B"]
    """another one"""


@dataclasses.dataclass(frozen=True)
class Checkpoints(Json):
    """Lists and verifies the checkpoints of a run; shows which one a resume uses.

    --prune deletes those in aside/, which were superseded or damaged, with their files.
    """

    directory: Annotated[Path, "DIR"]
    """a run directory, or s3://BUCKET/PATH"""
    _: dataclasses.KW_ONLY
    prune: bool = False
    """first delete the checkpoints in aside/; the run must not be active"""


@dataclasses.dataclass(frozen=True)
class FindNan(OfModel, Json):
    """Finds where the NaN/Inf began that ended a run.

    When bad steps with NaN/Inf end a run, it saves the state before the first of them, and its
    batch. This command computes that step again, with a check after each operation, and prints the
    line of the model that computes the first NaN, the losses and gradients that are NaN/Inf, and
    the examples that compute it alone. It needs neither the data nor the devices of the run, and
    does not change the run. RUN is a run directory, such as output/latest, or s3://BUCKET/PATH.
    """

    module = "find_nan"

    run: Annotated[Path, "RUN"]
    """a run that ended because of bad steps"""
    _: dataclasses.KW_ONLY
    simulate_devices: Annotated[int | None, "N", _ONE] = None
    """compute the step on N virtual CPU devices (default: on this machine's devices)"""


@dataclasses.dataclass(frozen=True)
class Report(Command):
    """Writes an HTML page about one run, or about several side by side; the page works offline.

    RUN is a run directory, such as output/latest, or s3://BUCKET/PATH. A run writes its own page
    when it ends; this command writes it at any time. For several runs, the page marks the
    differences.
    """

    runs: Annotated[tuple[Path, ...], "RUN"]
    """a run directory; others are compared with the first"""
    _: dataclasses.KW_ONLY
    out: _File = None
    """the page to write (default: report.html in RUN; for several runs or a bucket, in the current
    directory)"""


TABLE: Mapping[str, type[Command]] = {
    "generate": Generate,
    "fill": Fill,
    "encode": Encode,
    "decode": Decode,
    "reconstruct": Reconstruct,
    "evaluate": Evaluate,
    "export": Export,
    "import": Import,
    "prepare clips": PrepareClips,
    "prepare tokens": PrepareTokens,
    "prepare latents": PrepareLatents,
    "prepare sets": PrepareSets,
    "plan": Plan,
    "doctor": Doctor,
    "compare": Compare,
    "bench": Bench,
    "configs list": ConfigsList,
    "configs show": ConfigsShow,
    "configs diff": ConfigsDiff,
    "checkpoints": Checkpoints,
    "find-nan": FindNan,
    "report": Report,
}
"""Name of a command, with its action -> its flags."""
