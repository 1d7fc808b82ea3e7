"""Each recipe holds the values of its source's own file, or lists the difference with its reason.

A table has every key of the file. `ours` names the field that has the key's value, `ignored` says
why a key has no effect on the model that is trained, and `differs` has our value and the reason.
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
    """A source's file, its values, and what becomes of each key."""

    configs: tuple[str, ...]
    source: str
    values: Mapping[str, Any]
    ours: Mapping[str, str]
    ignored: Mapping[str, str]
    differs: Mapping[str, tuple[str, Any, str]]
    own: Mapping[str, str]


_SYSTEM = "where and how the program runs"
_LOGGING = "logging and checkpoints"
_NETWORK = "a property of the network at any size, held by tests/interop"

ETTIN = Recipe(
    configs=("ettin_150m_h100_8",),
    source=(
        "https://github.com/JHU-CLSP/ettin-encoder-vs-decoder/blob/"
        "496a3f42c7dfabc293dd8e121fa771f8fba47694/pretraining/configs/standard/base/"
        "encoder_base.yaml"
    ),
    values={
        "data_local": "ettin_tokenized_data",
        "data_remote": None,
        "max_seq_len": 1024,
        "tokenizer_name": "bclavie/olmo_bert_template",
        "mlm_probability": 0.3,
        "count_padding_tokens": False,
        "run_name": "encoder_no_packing",
        "model.name": "flex_bert",
        "model.pretrained_model_name": "bert-base-uncased",
        "model.tokenizer_name": "bclavie/olmo_bert_template",
        "model.disable_train_metrics": True,
        "vocab_size": 50_368,
        "init_method": "full_megatron",
        "num_hidden_layers": 22,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_attention_heads": 12,
        "attention_layer": "rope",
        "attention_probs_dropout_prob": 0.0,
        "attn_out_bias": False,
        "attn_out_dropout_prob": 0.1,
        "attn_qkv_bias": False,
        "bert_layer": "prenorm",
        "embed_dropout_prob": 0.0,
        "embed_norm": True,
        "final_norm": True,
        "skip_first_prenorm": True,
        "embedding_layer": "sans_pos",
        "loss_function": "fa_cross_entropy",
        "loss_kwargs.reduction": "mean",
        "mlp_dropout_prob": 0.0,
        "mlp_in_bias": False,
        "mlp_layer": "glu",
        "mlp_out_bias": False,
        "normalization": "layernorm",
        "norm_kwargs.eps": 1e-5,
        "norm_kwargs.bias": False,
        "hidden_act": "gelu",
        "head_pred_act": "gelu",
        "activation_function": "gelu",
        "padding": "unpadded",
        "rotary_emb_dim": None,
        "rotary_emb_base": 10_000.0,
        "rotary_emb_scale_base": None,
        "rotary_emb_interleaved": False,
        "allow_embedding_resizing": True,
        "sliding_window": 128,
        "global_attn_every_n_layers": 3,
        "unpad_embeddings": True,
        "compile_model": True,
        "masked_prediction": True,
        "train_loader.name": "text",
        "train_loader.dataset.local": "ettin_tokenized_data",
        "train_loader.dataset.remote": None,
        "train_loader.dataset.split": "train",
        "train_loader.dataset.tokenizer_name": "bclavie/olmo_bert_template",
        "train_loader.dataset.max_seq_len": 1024,
        "train_loader.dataset.shuffle": True,
        "train_loader.dataset.mlm_probability": 0.3,
        "train_loader.dataset.streaming": False,
        "train_loader.dataset.shuffle_seed": 21,
        "train_loader.drop_last": True,
        "train_loader.num_workers": 6,
        "train_loader.sequence_packing": False,
        "train_loader.batch_size_warmup_min_size": 72,
        "train_loader.batch_size_warmup_tokens": 50_000_000_000,
        "eval_loader.name": "text",
        "eval_loader.dataset.local": "ettin_tokenized_data",
        "eval_loader.dataset.remote": None,
        "eval_loader.dataset.split": "validation",
        "eval_loader.dataset.tokenizer_name": "bclavie/olmo_bert_template",
        "eval_loader.dataset.max_seq_len": 1024,
        "eval_loader.dataset.shuffle": False,
        "eval_loader.dataset.mlm_probability": 0.15,
        "eval_loader.dataset.streaming": False,
        "eval_loader.drop_last": False,
        "eval_loader.num_workers": 3,
        "eval_loader.sequence_packing": False,
        "scheduler.name": "warmup_stable_decay",
        "scheduler.t_warmup": 3_000_000_000,
        "scheduler.alpha_f": 0.02,
        "scheduler.t_decay": 0,
        "optimizer.name": "decoupled_stableadamw",
        "optimizer.lr": 8e-4,
        "optimizer.betas": [0.9, 0.98],
        "optimizer.eps": 1e-6,
        "optimizer.weight_decay": 1e-5,
        "optimizer.filter_bias_norm_wd": True,
        "optimizer.log_grad_norm": True,
        "max_duration": 1_700_000_000_000,
        "eval_interval": "never",
        "global_train_batch_size": 4608,
        "global_eval_batch_size": 1024,
        "seed": 21,
        "device_eval_batch_size": 48,
        "device_train_microbatch_size": 72,
        "precision": "amp_bf16",
        "progress_bar": True,
        "log_to_console": True,
        "console_log_interval": "100ba",
        "callbacks.speed_monitor.window_size": 100,
        "callbacks.lr_monitor": {},
        "callbacks.scheduled_gc": {},
        "callbacks.log_grad_norm.batch_log_interval": 100,
        "callbacks.packing_efficiency.log_interval": 100,
        "loggers.wandb.project": "encoder_vs_decoder",
        "loggers.wandb.entity": "your_wandb_entity",
        "save_interval": 8_500_000_000,
        "save_num_checkpoints_to_keep": 100_000,
        "save_folder": "your_save_folder",
        "autoresume": True,
    },
    ours={
        "max_seq_len": "model.sequence_length",
        "train_loader.dataset.max_seq_len": "model.sequence_length",
        "eval_loader.dataset.max_seq_len": "model.sequence_length",
        "mlm_probability": "model.mask_fraction",
        "train_loader.dataset.mlm_probability": "model.mask_fraction",
        "vocab_size": "model.vocab_size",
        "num_hidden_layers": "model.layers",
        "hidden_size": "model.hidden",
        "intermediate_size": "model.ff",
        "num_attention_heads": "model.heads",
        "attn_out_dropout_prob": "model.attention_out_dropout",
        "rotary_emb_base": "model.global_base model.local_base",
        "sliding_window": "model.local_attention",
        "optimizer.lr": "optim.peak_lr",
        "optimizer.betas": "optim.b1,optim.b2",
        "optimizer.eps": "optim.eps",
        "optimizer.weight_decay": "optim.weight_decay",
        "global_train_batch_size": "data.batch_size",
    },
    ignored={
        "data_.*|run_name|.*loader.dataset.(local|remote|split)|.*loader.name": "the user's text",
        ".*tokenizer_name": "the tokenizer is trained on the user's text, or given",
        "count_padding_tokens": "windows have no padding to count",
        "model.(name|pretrained_model_name|disable_train_metrics)": _SYSTEM,
        "init_method": "tests/models/test_mlm.py holds the deviations; ours are not cut at three",
        "attention_layer|bert_layer|embedding_layer|mlp_layer|masked_prediction": _NETWORK,
        "attn_.*_bias|embed_norm|final_norm|skip_first_prenorm|mlp_.*_bias": _NETWORK,
        "(attention_probs|embed|mlp)_dropout_prob": "zero, and so no field",
        "normalization|norm_kwargs.*|.*_act|activation_function": _NETWORK,
        "rotary_emb_(dim|scale_base|interleaved)|global_attn_every_n_layers": _NETWORK,
        "loss_function|loss_kwargs.*": "the mean cross-entropy, as ours",
        "padding|unpad_embeddings|compile_model|allow_embedding_resizing": _SYSTEM,
        ".*dataset.(shuffle|streaming|shuffle_seed)|.*drop_last|.*num_workers": _SYSTEM,
        "scheduler.alpha_f": "of a decay whose length is zero",
        "optimizer.filter_bias_norm_wd": "tests/optim/test_build.py: only matrices decay",
        "optimizer.log_grad_norm": "not as a value; ours always records the norm",
        "eval_interval|global_eval_batch_size|device_eval.*": "the source does not validate",
        "eval_loader.sequence_packing": "the source does not validate",
        "seed|device_train_microbatch_size|precision|autoresume": _SYSTEM,
        "progress_bar|log_to_console|console_log_interval|callbacks.*|loggers.*": _LOGGING,
        "save_.*": _LOGGING,
    },
    differs={
        "train_loader.sequence_packing": (
            "model.attend",
            "document",
            "several documents in a window, which do not see each other, waste no padding",
        ),
        "train_loader.batch_size_warmup_min_size": (
            "data.batch_size",
            4608,
            "a run has one batch size: 2% of the tokens train with larger batches",
        ),
        "train_loader.batch_size_warmup_tokens": (
            "data.batch_size",
            4608,
            "a run has one batch size",
        ),
        "eval_loader.dataset.mlm_probability": (
            "model.mask_fraction",
            0.3,
            "validation masks as training does; a run has one masking rate",
        ),
        "scheduler.name": ("optim.schedule", "trapezoid", "the same, under nanochat's name"),
        "scheduler.t_warmup": ("optim.warmup_steps", 636, "3e9 tokens of 4608 x 1024 per step"),
        "scheduler.t_decay": (
            "optim.warmdown_fraction",
            0.05,
            "a run ends with a model to use; the source decays in two later runs",
        ),
        "optimizer.name": ("optim.clip_updates", True, "StableAdamW clips updates"),
        "max_duration": ("loop.steps", 360_000, "1.7e12 tokens of 4608 x 1024 per step"),
    },
    own={
        "data.tokenizer_kind": "byte-level BPE, as the source's tokenizer is",
        "optim.warmdown_shape": "1 - sqrt, as in the source's later runs",
        "optim.decouple_lr": "the decay of optimizer.name decoupled_stableadamw",
    },
)

BERT = Recipe(
    configs=("bert_base_h200_8",),
    source=(
        "google-research/bert at eedf571: modeling.py (BertConfig), optimization.py, "
        "create_pretraining_data.py; with the values of https://arxiv.org/abs/1810.04805, A.2"
    ),
    # Read in November 2026 in stored copies of that repository: optimization.py and the flags of
    # run_pretraining.py at 02102db, create_pretraining_data.py at 0be1c86 (without
    # do_whole_word_mask, which is in later copies); a bert_config.json with another vocabulary than
    # the base model's; quotations of the paper's A.2 for batch, rate, steps, dropout, and lengths.
    # Not seen: vocab_size, and the repository at eedf571 itself.
    values={
        "vocab_size": 30_522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "initializer_range": 0.02,
        "train_batch_size": 256,
        "learning_rate": 1e-4,
        "num_train_steps": 1_000_000,
        "num_warmup_steps": 10_000,
        "schedule": "linear",
        "weight_decay_rate": 0.01,
        "beta_1": 0.9,
        "beta_2": 0.999,
        "epsilon": 1e-6,
        "exclude_from_weight_decay": ["LayerNorm", "layer_norm", "bias"],
        "clip_norm": 1.0,
        "bias_correction": False,
        "max_seq_length": "128 for 90% of the steps, then 512",
        "masked_lm_prob": 0.15,
        "max_predictions_per_seq": 20,
        "random_token": 0.1,
        "kept_token": 0.1,
        "short_seq_prob": 0.1,
        "dupe_factor": 10,
        "next_sentence": True,
        "do_lower_case": True,
        "do_whole_word_mask": False,
    },
    ours={
        "vocab_size": "model.vocab_size",
        "hidden_size": "model.hidden",
        "num_hidden_layers": "model.layers",
        "num_attention_heads": "model.heads",
        "intermediate_size": "model.ff_width",
        "hidden_dropout_prob": "model.dropout",
        "max_position_embeddings": "model.sequence_length",
        "train_batch_size": "data.batch_size",
        "learning_rate": "optim.peak_lr",
        "num_train_steps": "loop.steps",
        "num_warmup_steps": "optim.warmup_steps",
        "schedule": "optim.schedule",
        "weight_decay_rate": "optim.weight_decay",
        "beta_1": "optim.b1",
        "beta_2": "optim.b2",
        "epsilon": "optim.eps",
        "clip_norm": "optim.max_grad_norm",
        "masked_lm_prob": "model.mask_fraction",
        "random_token": "data.random_share",
        "kept_token": "data.keep_share",
    },
    ignored={
        "hidden_act|initializer_range": _NETWORK,
        "do_lower_case": "WordPiece, as data.tokenizer_kind has it",
        "dupe_factor": "each epoch draws new masks",
        "max_predictions_per_seq": "15% of the sequence, as masked_lm_prob says",
    },
    differs={
        "attention_probs_dropout_prob": (
            "model.attention_dropout",
            0.0,
            "fused attention has no dropout; the docstring has the flag",
        ),
        "type_vocab_size": ("model.attend", "sequence", "only pairs of sentences need types"),
        "exclude_from_weight_decay": (
            "optim.weight_decay",
            0.01,
            "the same, and token and position embeddings, which decay in both",
        ),
        "bias_correction": (
            "optim.b2",
            0.999,
            "Adam with its correction, as in all programs since",
        ),
        "max_seq_length": (
            "model.sequence_length",
            512,
            "position vectors are those of one length; four times the paper's work per token",
        ),
        "short_seq_prob": ("model.sequence_length", 512, "all sequences are full"),
        "next_sentence": ("model.attend", "sequence", "RoBERTa (arXiv 1907.11692) showed no gain"),
        "do_whole_word_mask": ("model.mask_fraction", 0.15, "the same: single tokens"),
    },
    own={
        "data.tokenizer_kind": "WordPiece, as the source's tokenizer is",
        "optim.warmdown_.*": "of another schedule; the decay ends at zero",
    },
)

_NANOCHAT_IGNORED = {
    "run|model_tag|(eval|sample|save|core_metric)_every|core_metric_max_per_task": _LOGGING,
    "device_type|device_batch_size|resume_from_step": _SYSTEM,
    "num_iterations|target_flops": "off: the ratio of tokens to parameters decides",
}
NANOCHAT_2025 = Recipe(
    configs=("gpt_h100_8",),
    source="karpathy/nanochat at c75fe54: scripts/base_train.py, nanochat/gpt.py, nanochat/muon.py",
    # Read in November 2026 in copies without a revision: base_train.py and get_muon_momentum of
    # October 2025, gpt.py of the same time (025c432 of a fork), scripts/tok_train.py (65,536).
    values={
        "run": "dummy",
        "device_type": "",
        "depth": 20,
        "max_seq_len": 2048,
        "num_iterations": -1,
        "target_flops": -1.0,
        "target_param_data_ratio": 20,
        "device_batch_size": 32,
        "total_batch_size": 524_288,
        "embedding_lr": 0.2,
        "unembedding_lr": 0.004,
        "weight_decay": 0.0,
        "matrix_lr": 0.02,
        "grad_clip": 1.0,
        "warmup_ratio": 0.0,
        "warmdown_ratio": 0.2,
        "final_lr_frac": 0.0,
        "eval_every": 250,
        "eval_tokens": 20 * 524_288,
        "core_metric_every": 2000,
        "core_metric_max_per_task": 500,
        "sample_every": 2000,
        "model_tag": "",
        "vocab_size": 65_536,
        "adam_betas": [0.8, 0.95],
        "adam_eps": 1e-10,
        "muon.momentum": 0.95,
        "muon.first_momentum": 0.85,
        "muon.momentum_steps": 300,
        "rotary_base": 10_000,
    },
    ours={
        "depth": "model.depth",
        "max_seq_len": "model.sequence_length",
        "target_param_data_ratio": "loop.tokens_per_param",
        "embedding_lr": "optim.muon.embedding_lr",
        "unembedding_lr": "optim.muon.unembedding_lr",
        "weight_decay": "optim.weight_decay",
        "matrix_lr": "optim.muon.peak_lr",
        "grad_clip": "optim.max_grad_norm",
        "warmup_ratio": "optim.warmup_fraction",
        "warmdown_ratio": "optim.warmdown_fraction",
        "final_lr_frac": "optim.warmdown_to",
        "vocab_size": "model.vocab_size",
        "adam_betas": "optim.b1,optim.b2",
        "adam_eps": "optim.eps",
        "muon.momentum": "optim.muon.momentum",
        "muon.first_momentum": "optim.muon.first_momentum",
        "muon.momentum_steps": "optim.muon.momentum_steps",
        "rotary_base": "model.rotary_base",
    },
    ignored=_NANOCHAT_IGNORED,
    differs={
        "total_batch_size": ("data.batch_size", 256, "the same, in sequences of 2048"),
        "eval_tokens": ("loop.eval_examples", 5120, "the same, in sequences of 2048"),
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
    values={
        "run": "dummy",
        "device_type": "",
        "fp8": False,
        "fp8_recipe": "tensorwise",
        "depth": 20,
        "aspect_ratio": 64,
        "head_dim": 128,
        "max_seq_len": 2048,
        "window_pattern": "SSSL",
        "num_iterations": -1,
        "target_flops": -1.0,
        "target_param_data_ratio": 12,
        "device_batch_size": 32,
        "total_batch_size": -1,
        "embedding_lr": 0.3,
        "unembedding_lr": 0.008,
        "weight_decay": 0.28,
        "matrix_lr": 0.02,
        "scalar_lr": 0.5,
        "warmup_steps": 40,
        "warmdown_ratio": 0.65,
        "final_lr_frac": 0.05,
        "resume_from_step": -1,
        "eval_every": 250,
        "eval_tokens": 80 * 524_288,
        "core_metric_every": 2000,
        "core_metric_max_per_task": 500,
        "sample_every": 2000,
        "save_every": -1,
        "model_tag": None,
        "vocab_size": 32_768,
        "adam_eps": 1e-10,
        "muon.momentum": 0.97,
        "muon.first_momentum": 0.85,
        "muon.momentum_steps": 400,
        "muon.last_momentum": 0.9,
        "muon.beta2": 0.9,
        "qk_scale": 1.2,
        "rotary_base": 100_000,
    },
    ours={
        "head_dim": "model.head_width",
        "max_seq_len": "model.sequence_length",
        "window_pattern": "model.window_pattern",
        "warmup_steps": "optim.warmup_steps",
        "warmdown_ratio": "optim.warmdown_fraction",
        "final_lr_frac": "optim.warmdown_to",
        "vocab_size": "model.vocab_size",
        "adam_eps": "optim.eps",
        "muon.momentum": "optim.muon.momentum",
        "muon.first_momentum": "optim.muon.first_momentum",
        "muon.momentum_steps": "optim.muon.momentum_steps",
        "muon.last_momentum": "optim.muon.last_momentum",
        "muon.beta2": "optim.muon.variance_b2",
        "qk_scale": "model.qk_scale",
        "rotary_base": "model.rotary_base",
    },
    ignored=_NANOCHAT_IGNORED
    | {
        "fp8|fp8_recipe": "off, and so the recipe is unused",
        "aspect_ratio": "tests/models/test_gpt.py: the width of each depth",
        "(embedding|unembedding|matrix|scalar)_lr|weight_decay": (
            "test_the_rules_of_nanochat: scaled by the batch and the length"
        ),
        "total_batch_size": "test_the_rules_of_nanochat: it follows from the depth",
    },
    differs={
        "depth": (
            "model.depth",
            [12, 24],
            "the depth that the rules refer to, and the speed run's",
        ),
        "target_param_data_ratio": ("loop.steps", [2520, 5568], "12, and 8 as in the speed run"),
        "eval_tokens": (
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
    source=(
        "https://github.com/madebyollin/seraena/blob/d23119f51523f6913aedad5189fe8d260fae1564/"
        "TAEHV_Training_Example.ipynb, and seraena.py at 5e2433b"
    ),
    values={
        "train_encoder": True,
        "train_decoder": True,
        "dataset_path": "video_dataset",
        "hw": 64,
        "n_demo": 5,
        "n_frames": 12,
        "device": "cuda",
        "ref_dtype": "bfloat16",
        "dtype": "float32",
        "min_frame_delta": 1,
        "max_frame_delta": 5,
        "least_square": "64 pixels",
        "largest_square": "the shorter side",
        "flip": False,
        "color_jitter": 0.0,
        "blur": 0.0,
        "batch_size": 16,
        "clips_per_video": 1,
        "latent_channels": 16,
        "optimizer": "AdamW",
        "lr": 3e-4,
        "betas": [0.9, 0.95],
        "weight_decay": 0.01,
        "eps": 1e-8,
        "schedule": "constant",
        "warmup": 0,
        "grad_clip": None,
        "amp": "float16 with loss scaling",
        "steps": 34_500,
        "average.decay": 0.95,
        "average.rule": "min(0.95, n / 10)",
        "average.every": "2 s",
        "last_bias": 0.5,
        "teacher": "Wan 2.1",
        "teacher.latents": "sampled",
        "encoder_loss": 1.0,
        "reconstruction_loss": 1.0,
        "seraena_loss": 1.0,
        "seraena.frames": 3,
        "seraena.context": "the mean latent of the clip",
        "seraena.max_buff_len": 16_384,
        "seraena.lr": 3e-4,
        "seraena.betas": [0.9, 0.99],
        "seraena.weight_decay": 0.01,
        "seraena.grad_clip": None,
        "seraena.use_amp": True,
    },
    ours={
        "max_frame_delta": "data.max_frame_delta",
        "flip": "data.flip",
        "batch_size": "data.batch_size",
        "clips_per_video": "data.clips_per_video",
        "latent_channels": "model.latent_channels",
        "lr": "optim.peak_lr",
        "betas": "optim.b1,optim.b2",
        "weight_decay": "optim.weight_decay",
        "eps": "optim.eps",
        "grad_clip": "optim.max_grad_norm",
        "average.decay": "optim.average.decay",
        "reconstruction_loss": "model.reconstruction_weight",
        "seraena_loss": "model.adversary.weight",
        "seraena.frames": "model.adversary.frames",
        "seraena.max_buff_len": "model.adversary.replay",
        "seraena.lr": "model.adversary.peak_lr",
        "seraena.betas": "model.adversary.b1,model.adversary.b2",
        "seraena.weight_decay": "model.adversary.weight_decay",
    },
    ignored={
        "dataset_path|n_demo": "the user's videos, and what is shown",
        "device|ref_dtype|dtype|amp|seraena.use_amp": _SYSTEM,
        "seraena.(context|grad_clip)": "tests/models/reconstruction/test_adversary.py",
        "color_jitter|blur": "none, and so no field",
        "min_frame_delta": "always 1, and so no field",
    },
    differs={
        "train_encoder": ("model.freeze", (), "both train, without a teacher"),
        "train_decoder": ("model.freeze", (), "both train"),
        "hw": ("data.crop", (64, 64), "the same, as height and width"),
        "n_frames": ("model.frames", 13, "the loss compares all 13, and 9 of 12"),
        "least_square": (
            "data.min_crop_scale",
            1.0,
            "64 of the 480 pixels of a validation clip, whatever the video's size",
        ),
        "largest_square": ("data.max_crop_scale", 7.5, "the shorter side: 480 / 64"),
        "optimizer": ("optim.muon.peak_lr", 2.5e-3, "better on a small scale (docs/results.md)"),
        "schedule": ("optim.schedule", "cosine", "Muon's rate was compared with it"),
        "warmup": ("optim.warmup_steps", 2000, "as in the other video configs: 1% of the run"),
        "steps": ("loop.steps", 200_000, "from scratch, without a teacher's latents"),
        "average.rule": ("optim.average.rule", "ramp", "the same rule"),
        "average.every": ("optim.average.every", 8, "2 s are 8 of the published steps"),
        "last_bias": ("model.init", "thumbnail", "shows colors from the first step"),
        "teacher": ("model.teacher", None, "this config needs no other weights; taew2_2 does"),
        "teacher.latents": ("model.teacher", None, "no teacher"),
        "encoder_loss": ("model.teacher", None, "no teacher"),
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
    source=(
        "https://huggingface.co/Wan-AI/Wan2.2-TI2V-5B-Diffusers, vae/config.json; no recipe of its "
        "training has been published"
    ),
    # Read in November 2026: vae22_diffusers_config of diffusers' converter, which wrote that file,
    # the defaults of AutoencoderKLWan for the keys that it omits, and copies of the file itself in
    # other programs, which have all keys but _diffusers_version.
    values={
        "_class_name": "AutoencoderKLWan",
        "_diffusers_version": "0.35.0.dev0",
        "attn_scales": [],
        "base_dim": 160,
        "clip_output": False,
        "decoder_base_dim": 256,
        "dim_mult": [1, 2, 4, 4],
        "dropout": 0.0,
        "in_channels": 12,
        "is_residual": True,
        "latents_mean": "48 numbers",
        "latents_std": "48 numbers",
        "num_res_blocks": 2,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        "scale_factor_temporal": 4,
        "temperal_downsample": [False, True, True],
        "z_dim": 48,
    },
    ours={
        "base_dim": "model.encoder_width",
        "decoder_base_dim": "model.decoder_width",
        "z_dim": "model.latent_channels",
        "scale_factor_spatial": "model.space_factor",
    },
    ignored={
        "_class_name|_diffusers_version": "of the program that wrote the file",
        "clip_output": "of inference",
        "attn_scales|dim_mult|dropout|is_residual|num_res_blocks|temperal_downsample": _NETWORK,
        "in_channels|out_channels|patch_size|scale_factor_temporal": _NETWORK,
        "latents_(mean|std)": "read with the weights that the run starts from",
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
def test_each_key_of_a_source_is_ours_ignored_or_a_listed_difference(name: str) -> None:
    recipe, problems = RECIPES[name], []
    runs = [config.load(one) for one in recipe.configs]
    for key, value in recipe.values.items():
        ignored = any(re.fullmatch(pattern, key) for pattern in recipe.ignored)
        if (key in recipe.ours) + ignored + (key in recipe.differs) != 1:
            problems.append(f"{key} must be in one of ours, ignored, and differs")
        for field in recipe.ours.get(key, "").split():
            problems += [
                f"{key}={value!r}, but {field}={value_of(run, field)!r}"
                for run in runs
                if not equal(value_of(run, field), value)
            ]
    for key, (field, ours, _) in recipe.differs.items():
        wanted = ours if isinstance(ours, list) else [ours] * len(runs)  # a list has one for each
        problems += [
            f"{key}: listed as {field}={want!r}, but it is {value_of(run, field)!r}"
            for run, want in zip(runs, wanted, strict=True)
            if not equal(value_of(run, field), want)
        ]
    problems += [f"unknown key {key}" for key in {*recipe.ours, *recipe.differs} - {*recipe.values}]
    problems += [
        f"{pattern} matches no key"
        for pattern in recipe.ignored
        if recipe.ignored is not _NANOCHAT_IGNORED
        and pattern not in _NANOCHAT_IGNORED
        and not any(re.fullmatch(pattern, key) for key in recipe.values)
    ]
    assert not problems, "\n".join([recipe.source, *problems])


@pytest.mark.parametrize("name", RECIPES)
def test_each_field_that_is_on_comes_from_the_source_or_has_a_reason(name: str) -> None:
    recipe = RECIPES[name]
    known = {
        field
        for fields in recipe.ours.values()
        for field in re.split("[ ,]", fields.replace("ff_width", "ff"))
    } | {field for field, _, _ in recipe.differs.values()}
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
    run, values = config.load(name), NANOCHAT_2026.values
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
    for ours, key in (
        (muon.peak_lr, "matrix_lr"),
        (muon.embedding_lr, "embedding_lr"),
        (muon.unembedding_lr, "unembedding_lr"),
        (muon.scalar_lr, "scalar_lr"),
    ):
        assert ours == pytest.approx(values[key] * scale), key
    assert run.optim.weight_decay == pytest.approx(values["weight_decay"] * scale / longer)
