"""Each recipe holds the values of its source's own file, or lists the difference with its reason.

A recipe has every key of the file that has an effect on the model that is trained: `ours` has its
value and the field of ours that has it, too, and `differs` its value, ours, and the reason.

The test also goes the other way: a field of `model`, `data`, or `optim` that is on must be in one
of them, or in `own`.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import pytest

from jaxtrain import config
from jaxtrain.config import overrides

# What has no effect on the model that is trained, in any config.
NO_EFFECT = (
    r"model\.(remat|init_from|norm_eps)"
    r"|data\.(batch_size|path|prefetch|workers|max_bad_share|max_examples|val_documents|text_field)"
    r"|data\.(convert_on|cache_dir|train_split|prepare|windows)"
    r"|optim\.(accumulate|bad_\w+)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A source's file, and what becomes of its keys."""

    configs: tuple[str, ...]
    source: str
    ours: Mapping[str, tuple[Any, str]]
    differs: Mapping[str, tuple[Any, str, Any, str]]
    own: Mapping[str, str]


ETTIN = Recipe(
    configs=("ettin_150m_h100_8",),
    source="https://github.com/JHU-CLSP/ettin-encoder-vs-decoder/blob/"
    "496a3f42c7dfabc293dd8e121fa771f8fba47694/pretraining/configs/standard/base/"
    "encoder_base.yaml",
    # Keys without effect on the model that is trained: data_*, run_name,
    # *loader.dataset.(local/remote/split), *loader.name (the user's text); *tokenizer_name (the
    # tokenizer is trained on the user's text, or given); count_padding_tokens (windows have no
    # padding to count); model.(name/pretrained_model_name/disable_train_metrics), padding,
    # unpad_embeddings, compile_model, allow_embedding_resizing,
    # *dataset.(shuffle/streaming/shuffle_seed), *drop_last, *num_workers, seed,
    # device_train_microbatch_size, precision, autoresume (where and how the program runs);
    # init_method (tests/models/test_mlm.py holds the deviations; ours are not cut at three);
    # attention_layer, bert_layer, embedding_layer, mlp_layer, masked_prediction, attn_*_bias,
    # embed_norm, final_norm, skip_first_prenorm, mlp_*_bias, normalization, norm_kwargs*, *_act,
    # activation_function, rotary_emb_(dim/scale_base/interleaved), global_attn_every_n_layers (a
    # property of the network at any size, held by tests/interop);
    # (attention_probs/embed/mlp)_dropout_prob (zero, and so no field); loss_function, loss_kwargs*
    # (the mean cross-entropy, as ours); scheduler.alpha_f (of a decay whose length is zero);
    # optimizer.filter_bias_norm_wd (tests/optim/test_build.py: only matrices decay);
    # optimizer.log_grad_norm (not as a value; ours always records the norm); eval_interval,
    # global_eval_batch_size, device_eval*, eval_loader.sequence_packing (the source does not
    # validate); progress_bar, log_to_console, console_log_interval, callbacks*, loggers*, save_*
    # (logging and checkpoints).
    ours={
        "max_seq_len": (1024, "model.sequence_length"),
        "mlm_probability": (0.3, "model.mask_fraction"),
        "vocab_size": (50_368, "model.vocab_size"),
        "num_hidden_layers": (22, "model.layers"),
        "hidden_size": (768, "model.hidden"),
        "intermediate_size": (1152, "model.ff"),
        "num_attention_heads": (12, "model.heads"),
        "attn_out_dropout_prob": (0.1, "model.attention_out_dropout"),
        "rotary_emb_base": (10_000.0, "model.global_base model.local_base"),
        "sliding_window": (128, "model.local_attention"),
        "train_loader.dataset.max_seq_len": (1024, "model.sequence_length"),
        "train_loader.dataset.mlm_probability": (0.3, "model.mask_fraction"),
        "eval_loader.dataset.max_seq_len": (1024, "model.sequence_length"),
        "optimizer.lr": (8e-4, "optim.peak_lr"),
        "optimizer.betas": ([0.9, 0.98], "optim.b1,optim.b2"),
        "optimizer.eps": (1e-6, "optim.eps"),
        "optimizer.weight_decay": (1e-5, "optim.weight_decay"),
        "global_train_batch_size": (4608, "data.batch_size"),
    },
    differs={
        "train_loader.sequence_packing": (
            False,
            "model.attend",
            "document",
            "several documents in a window, which do not see each other, waste no padding",
        ),
        "train_loader.batch_size_warmup_min_size": (
            72,
            "data.batch_size",
            4608,
            "a run has one batch size: 2% of the tokens train with larger batches",
        ),
        "train_loader.batch_size_warmup_tokens": (
            50_000_000_000,
            "data.batch_size",
            4608,
            "a run has one batch size",
        ),
        "eval_loader.dataset.mlm_probability": (
            0.15,
            "model.mask_fraction",
            0.3,
            "validation masks as training does; a run has one masking rate",
        ),
        "scheduler.name": (
            "warmup_stable_decay",
            "optim.schedule",
            "trapezoid",
            "the same, under nanochat's name",
        ),
        "scheduler.t_warmup": (
            3_000_000_000,
            "optim.warmup_steps",
            636,
            "3e9 tokens of 4608 x 1024 per step",
        ),
        "scheduler.t_decay": (
            0,
            "optim.warmdown_fraction",
            0.05,
            "a run ends with a model to use; the source decays in two later runs",
        ),
        "optimizer.name": (
            "decoupled_stableadamw",
            "optim.clip_updates",
            True,
            "StableAdamW clips updates",
        ),
        "max_duration": (
            1_700_000_000_000,
            "loop.steps",
            360_000,
            "1.7e12 tokens of 4608 x 1024 per step",
        ),
    },
    own={
        "data.tokenizer_kind": "byte-level BPE, as the source's tokenizer is",
        "optim.warmdown_shape": "1 - sqrt, as in the source's later runs",
        "optim.decouple_lr": "the decay of optimizer.name decoupled_stableadamw",
    },
)

BERT = Recipe(
    configs=("bert_base_h200_8",),
    source="google-research/bert at eedf571: modeling.py (BertConfig), optimization.py, "
    "create_pretraining_data.py; with the values of https://arxiv.org/abs/1810.04805, A.2",
    # Read in November 2026 in stored copies of that repository: optimization.py and the flags of
    # run_pretraining.py at 02102db, create_pretraining_data.py at 0be1c86 (without
    # do_whole_word_mask, which is in later copies); a bert_config.json with another vocabulary than
    # the base model's; quotations of the paper's A.2 for batch, rate, steps, dropout, and lengths.
    # Not seen: vocab_size, and the repository at eedf571 itself.
    # Keys without effect on the model that is trained: hidden_act, initializer_range (a property of
    # the network at any size, held by tests/interop); do_lower_case (WordPiece, as
    # data.tokenizer_kind has it); dupe_factor (each epoch draws new masks); max_predictions_per_seq
    # (15% of the sequence, as masked_lm_prob says).
    ours={
        "vocab_size": (30_522, "model.vocab_size"),
        "hidden_size": (768, "model.hidden"),
        "num_hidden_layers": (12, "model.layers"),
        "num_attention_heads": (12, "model.heads"),
        "intermediate_size": (3072, "model.ff_width"),
        "hidden_dropout_prob": (0.1, "model.dropout"),
        "max_position_embeddings": (512, "model.sequence_length"),
        "train_batch_size": (256, "data.batch_size"),
        "learning_rate": (1e-4, "optim.peak_lr"),
        "num_train_steps": (1_000_000, "loop.steps"),
        "num_warmup_steps": (10_000, "optim.warmup_steps"),
        "schedule": ("linear", "optim.schedule"),
        "weight_decay_rate": (0.01, "optim.weight_decay"),
        "beta_1": (0.9, "optim.b1"),
        "beta_2": (0.999, "optim.b2"),
        "epsilon": (1e-6, "optim.eps"),
        "clip_norm": (1.0, "optim.max_grad_norm"),
        "masked_lm_prob": (0.15, "model.mask_fraction"),
        "random_token": (0.1, "data.random_share"),
        "kept_token": (0.1, "data.keep_share"),
    },
    differs={
        "attention_probs_dropout_prob": (
            0.1,
            "model.attention_dropout",
            0.0,
            "fused attention has no dropout; the docstring has the flag",
        ),
        "type_vocab_size": (2, "model.attend", "sequence", "only pairs of sentences need types"),
        "exclude_from_weight_decay": (
            ["LayerNorm", "layer_norm", "bias"],
            "optim.weight_decay",
            0.01,
            "the same, and token and position embeddings, which decay in both",
        ),
        "bias_correction": (
            False,
            "optim.b2",
            0.999,
            "Adam with its correction, as in all programs since",
        ),
        "max_seq_length": (
            "128 for 90% of the steps, then 512",
            "model.sequence_length",
            512,
            "position vectors are those of one length; four times the paper's work per token",
        ),
        "short_seq_prob": (0.1, "model.sequence_length", 512, "all sequences are full"),
        "next_sentence": (
            True,
            "model.attend",
            "sequence",
            "RoBERTa (arXiv 1907.11692) showed no gain",
        ),
        "do_whole_word_mask": (False, "model.mask_fraction", 0.15, "the same: single tokens"),
    },
    own={
        "data.tokenizer_kind": "WordPiece, as the source's tokenizer is",
        "optim.warmdown_.*": "of another schedule; the decay ends at zero",
    },
)

NANOCHAT_2025 = Recipe(
    configs=("gpt_h100_8",),
    source="karpathy/nanochat at c75fe54: scripts/base_train.py, nanochat/gpt.py, nanochat/muon.py",
    # Read in November 2026 in copies without a revision: base_train.py and get_muon_momentum of
    # October 2025, gpt.py of the same time (025c432 of a fork), scripts/tok_train.py (65,536).
    # Keys without effect on the model that is trained: run, model_tag,
    # (eval/sample/save/core_metric)_every, core_metric_max_per_task (logging and checkpoints);
    # device_type, device_batch_size, resume_from_step (where and how the program runs);
    # num_iterations, target_flops (off: the ratio of tokens to parameters decides).
    ours={
        "depth": (20, "model.depth"),
        "max_seq_len": (2048, "model.sequence_length"),
        "target_param_data_ratio": (20, "loop.tokens_per_param"),
        "embedding_lr": (0.2, "optim.muon.embedding_lr"),
        "unembedding_lr": (0.004, "optim.muon.unembedding_lr"),
        "weight_decay": (0.0, "optim.weight_decay"),
        "matrix_lr": (0.02, "optim.muon.peak_lr"),
        "grad_clip": (1.0, "optim.max_grad_norm"),
        "warmup_ratio": (0.0, "optim.warmup_fraction"),
        "warmdown_ratio": (0.2, "optim.warmdown_fraction"),
        "final_lr_frac": (0.0, "optim.warmdown_to"),
        "vocab_size": (65_536, "model.vocab_size"),
        "adam_betas": ([0.8, 0.95], "optim.b1,optim.b2"),
        "adam_eps": (1e-10, "optim.eps"),
        "muon.momentum": (0.95, "optim.muon.momentum"),
        "muon.first_momentum": (0.85, "optim.muon.first_momentum"),
        "muon.momentum_steps": (300, "optim.muon.momentum_steps"),
        "rotary_base": (10_000, "model.rotary_base"),
    },
    differs={
        "total_batch_size": (524_288, "data.batch_size", 256, "the same, in sequences of 2048"),
        "eval_tokens": (20 * 524_288, "loop.eval_examples", 5120, "the same, in sequences of 2048"),
    },
    own={
        "model.recipe": "this source's initial values",
        "model.qk_scale": "one: the source does not scale",
        "optim.schedule": "the source's: constant, then linear",
        "optim.warmdown_shape": "linear",
        "optim.peak_lr": "of no parameter",
        "optim.muon.scalar_lr": "of no parameter: this model has no scalars",
    },
)
NANOCHAT_2026 = Recipe(
    configs=("gpt_2026_h100_1", "gpt_2026_h100_8"),
    source="karpathy/nanochat at 92d63d4: scripts/base_train.py, nanochat/(gpt|optim).py",
    # Read in November 2026: all flags and the momentum of base_train.py at 00255c1, optim.py at
    # 0e4b3fa; copies without a revision of gpt.py (1.2, 100,000, 1e-10, beta2 0.9) and of
    # scripts/tok_train.py (32,768).
    # Keys without effect on the model that is trained: run, model_tag,
    # (eval/sample/save/core_metric)_every, core_metric_max_per_task (logging and checkpoints);
    # device_type, device_batch_size, resume_from_step (where and how the program runs);
    # num_iterations, target_flops (off: the ratio of tokens to parameters decides); fp8, fp8_recipe
    # (off, and so the recipe is unused); aspect_ratio (tests/models/test_gpt.py: the width of each
    # depth); (embedding/unembedding/matrix/scalar)_lr, weight_decay (test_the_rules_of_nanochat:
    # scaled by the batch and the length); total_batch_size (test_the_rules_of_nanochat: it follows
    # from the depth).
    ours={
        "head_dim": (128, "model.head_width"),
        "max_seq_len": (2048, "model.sequence_length"),
        "window_pattern": ("SSSL", "model.window_pattern"),
        "warmup_steps": (40, "optim.warmup_steps"),
        "warmdown_ratio": (0.65, "optim.warmdown_fraction"),
        "final_lr_frac": (0.05, "optim.warmdown_to"),
        "vocab_size": (32_768, "model.vocab_size"),
        "adam_eps": (1e-10, "optim.eps"),
        "muon.momentum": (0.97, "optim.muon.momentum"),
        "muon.first_momentum": (0.85, "optim.muon.first_momentum"),
        "muon.momentum_steps": (400, "optim.muon.momentum_steps"),
        "muon.last_momentum": (0.9, "optim.muon.last_momentum"),
        "muon.beta2": (0.9, "optim.muon.variance_b2"),
        "qk_scale": (1.2, "model.qk_scale"),
        "rotary_base": (100_000, "model.rotary_base"),
    },
    differs={
        "depth": (
            20,
            "model.depth",
            [12, 24],
            "the depth that the rules refer to, and the speed run's",
        ),
        "target_param_data_ratio": (
            12,
            "loop.steps",
            [2520, 5568],
            "12, and 8 as in the speed run",
        ),
        "eval_tokens": (
            80 * 524_288,
            "loop.eval_examples",
            2048,
            "4.2 million tokens: 20 times fewer, of a validation that costs a thirtieth of the run",
        ),
    },
    own={
        "model.(recipe|value_embeddings|residual_scalars|smear|backout)": (
            "the source's network, held by tests/models/test_gpt_2026.py"
        ),
        "data.fit_documents": "the source's best-fit packing",
        "optim.schedule": "the source's: warm-up, constant, then linear",
        "optim.warmdown_shape": "linear",
        "optim.(peak_lr|b1|b2)": "of no parameter: the roles have theirs (tests/optim)",
        "optim.muon.(equilibrate|polar_express|cautious_decay)": "the source's Muon",
        "optim.muon.\\w+_lr|optim.weight_decay": "test_the_rules_of_nanochat",
    },
)
TAEHV = Recipe(
    configs=("taehv_h100_1",),
    source="https://github.com/madebyollin/seraena/blob/d23119f51523f6913aedad5189fe8d260fae1564/"
    "TAEHV_Training_Example.ipynb, and seraena.py at 5e2433b",
    # Keys without effect on the model that is trained: dataset_path, n_demo (the user's videos, and
    # what is shown); device, ref_dtype, dtype, amp, seraena.use_amp (where and how the program
    # runs); seraena.(context/grad_clip) (tests/models/reconstruction/test_adversary.py);
    # color_jitter, blur (none, and so no field); min_frame_delta (always 1, and so no field).
    ours={
        "max_frame_delta": (5, "data.max_frame_delta"),
        "flip": (False, "data.flip"),
        "batch_size": (16, "data.batch_size"),
        "clips_per_video": (1, "data.clips_per_video"),
        "latent_channels": (16, "model.latent_channels"),
        "lr": (3e-4, "optim.peak_lr"),
        "betas": ([0.9, 0.95], "optim.b1,optim.b2"),
        "weight_decay": (0.01, "optim.weight_decay"),
        "eps": (1e-8, "optim.eps"),
        "grad_clip": (None, "optim.max_grad_norm"),
        "average.decay": (0.95, "optim.average.decay"),
        "reconstruction_loss": (1.0, "model.reconstruction_weight"),
        "seraena_loss": (1.0, "model.adversary.weight"),
        "seraena.frames": (3, "model.adversary.frames"),
        "seraena.max_buff_len": (16_384, "model.adversary.replay"),
        "seraena.lr": (3e-4, "model.adversary.peak_lr"),
        "seraena.betas": ([0.9, 0.99], "model.adversary.b1,model.adversary.b2"),
        "seraena.weight_decay": (0.01, "model.adversary.weight_decay"),
    },
    differs={
        "train_encoder": (True, "model.freeze", (), "both train, without a teacher"),
        "train_decoder": (True, "model.freeze", (), "both train"),
        "hw": (64, "data.crop", (64, 64), "the same, as height and width"),
        "n_frames": (12, "model.frames", 13, "the loss compares all 13, and 9 of 12"),
        "least_square": (
            "64 pixels",
            "data.min_crop_scale",
            1.0,
            "64 of the 480 pixels of a validation clip, whatever the video's size",
        ),
        "largest_square": (
            "the shorter side",
            "data.max_crop_scale",
            7.5,
            "the shorter side: 480 / 64",
        ),
        "optimizer": (
            "AdamW",
            "optim.muon.peak_lr",
            2.5e-3,
            "better on a small scale (docs/results.md)",
        ),
        "schedule": ("constant", "optim.schedule", "cosine", "Muon's rate was compared with it"),
        "warmup": (0, "optim.warmup_steps", 2000, "as in the other video configs: 1% of the run"),
        "steps": (34_500, "loop.steps", 200_000, "from scratch, without a teacher's latents"),
        "average.rule": ("min(0.95, n / 10)", "optim.average.rule", "ramp", "the same rule"),
        "average.every": ("2 s", "optim.average.every", 8, "2 s are 8 of the published steps"),
        "last_bias": (0.5, "model.init", "thumbnail", "shows colors from the first step"),
        "teacher": (
            "Wan 2.1",
            "model.teacher",
            None,
            "this config needs no other weights; taew2_2 does",
        ),
        "teacher.latents": ("sampled", "model.teacher", None, "no teacher"),
        "encoder_loss": (1.0, "model.teacher", None, "no teacher"),
    },
    own={
        "model.(height|width)": "of validation clips",
        "model.(encoder_width|decoder.*|time_downscale|trim|patch_size)": "TAEHV's network",
        "model.reconstruction_error": "squared, as F.mse_loss",
        "data.crops_per_clip": "decoding is the bottleneck: four squares of each decoded clip",
        "optim.warmdown_.*": "of another schedule; the decay ends at zero",
        "optim.muon.*": "see optimizer",
    },
)

WAN = Recipe(
    configs=("wan2_2_decoder_h100_1", "wan2_2_decoder_h100_8"),
    source="https://huggingface.co/Wan-AI/Wan2.2-TI2V-5B-Diffusers, vae/config.json; no recipe of "
    "its training has been published",
    # Read in November 2026: vae22_diffusers_config of diffusers' converter, which wrote that file,
    # the defaults of AutoencoderKLWan for the keys that it omits, and copies of the file itself in
    # other programs, which have all keys but _diffusers_version.
    # Keys without effect on the model that is trained: _class_name, _diffusers_version (of the
    # program that wrote the file); clip_output (of inference); attn_scales, dim_mult, dropout,
    # is_residual, num_res_blocks, temperal_downsample, in_channels, out_channels, patch_size,
    # scale_factor_temporal (a property of the network at any size, held by tests/interop);
    # latents_(mean/std) (read with the weights that the run starts from).
    ours={
        "base_dim": (160, "model.encoder_width"),
        "decoder_base_dim": (256, "model.decoder_width"),
        "scale_factor_spatial": (16, "model.space_factor"),
        "z_dim": (48, "model.latent_channels"),
    },
    differs={},
    own={
        "model.(frames|height|width|chunk|version)": "clips of 4 n + 1 frames, of any size",
        "model.reconstruction_(weight|error)": "the squared error; no recipe is published",
        "model.freeze": "only the decoder trains",
        "data.(min|max)_(frame_delta|crop_scale)|data.flip|data.cl.*|data.crops_per_clip": (
            "no recipe is published"
        ),
        "optim.*": "a fine-tuning of a decoder that is good already; no published recipe",
    },
)
RECIPES = {
    "ettin": ETTIN,
    "bert": BERT,
    "nanochat 2025": NANOCHAT_2025,
    "nanochat 2026": NANOCHAT_2026,
    "taehv": TAEHV,
    "wan": WAN,
}


def value_of(run: config.Run, path: str) -> Any:
    """Returns the value of a dotted field; of several, separated by commas, the list of them."""
    if "," in path:
        return [value_of(run, one) for one in path.split(",")]
    value: Any = run
    for name in path.split("."):
        value = getattr(value, name)
    return value


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9)
    return bool(one == other) or (isinstance(one, list) and tuple(one) == other)


@pytest.mark.parametrize("name", RECIPES)
def test_each_key_of_a_source_is_ours_or_a_listed_difference(name: str) -> None:
    recipe = RECIPES[name]
    runs = [config.load(one) for one in recipe.configs]
    problems = [
        f"{key}={value!r}, but {field}={value_of(run, field)!r}"
        for key, (value, fields) in recipe.ours.items()
        for field in fields.split()
        for run in runs
        if not equal(value_of(run, field), value)
    ]
    for key, (_, field, ours, _) in recipe.differs.items():
        wanted = ours if isinstance(ours, list) else [ours] * len(runs)  # a list has one for each
        problems += [
            f"{key}: listed as {field}={want!r}, but it is {value_of(run, field)!r}"
            for run, want in zip(runs, wanted, strict=True)
            if not equal(value_of(run, field), want)
        ]
    assert not problems, "\n".join([recipe.source, *problems])


@pytest.mark.parametrize("name", RECIPES)
def test_each_field_that_is_on_comes_from_the_source_or_has_a_reason(name: str) -> None:
    recipe = RECIPES[name]
    known = {
        field
        for _, fields in recipe.ours.values()
        for field in re.split("[ ,]", fields.replace("ff_width", "ff"))
    } | {field for _, field, _, _ in recipe.differs.values()}
    for run in map(config.load, recipe.configs):
        for leaf in overrides.leaves(run):
            if not re.match(r"(model|data|optim)\.", leaf.name) or leaf.value in (None, False, 0):
                continue
            if leaf.value in ((), "") or re.fullmatch(NO_EFFECT, leaf.name):
                continue
            of_own = any(re.fullmatch(pattern, leaf.name) for pattern in recipe.own)
            assert leaf.name in known or of_own, f"{leaf.name}={leaf.value!r} is of no source"


@pytest.mark.parametrize("name", NANOCHAT_2026.configs)
def test_the_rules_of_nanochat(name: str) -> None:
    """Batch, rates, and decay follow from the depth, as base_train.py computes them."""
    run = config.load(name)
    ratio = {12: 12, 24: 8}[run.model.depth]

    def tokens(depth: int) -> float:
        width = 64 * depth
        gates = sum(12 * width // 128 for i in range(depth) if i % 2 == (depth - 1) % 2)
        return ratio * (12 * depth * width**2 + gates + 32_768 * width)

    longer = tokens(run.model.depth) / tokens(12)
    batch = 2 ** round(math.log2(2**19 * longer**0.383))
    scale = math.sqrt(batch / 2**19)
    assert run.data.batch_size * 2048 == batch
    assert run.loop.steps == int(tokens(run.model.depth)) // batch
    muon = run.optim.muon
    rates = (muon.peak_lr, muon.embedding_lr, muon.unembedding_lr, muon.scalar_lr)
    assert rates == pytest.approx([rate * scale for rate in (0.02, 0.3, 0.008, 0.5)])
    assert run.optim.weight_decay == pytest.approx(0.28 * scale / longer)
