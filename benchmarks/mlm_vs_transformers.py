"""Compares the training step of the masked language model with transformers' BertForMaskedLM.

    python benchmarks/mlm_vs_transformers.py [--rounds N] [--section.field value ...]

Both sides use the same weights, batches and optimizer. Dropout is as configured when timing, and
off when comparing losses. On a GPU, transformers runs in bfloat16 with SDPA and torch.compile.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import common_start

os.environ.update(common_start.SHARED_GPU)

import numpy as np
import ours
import results
import sizes
import torch
import torch_training
import transformers
import word_batches

from jaxtrain import config
from jaxtrain.data.text import specials
from jaxtrain.models import bert_weights

# BERT base on a GPU; on a CPU the config's own sizes: 8 layers of width 256, vocabulary 25,000.
ON_GPU = ("mlm_h200_8", *sizes.BERT_BASE)
ON_CPU = ("mlm_h200_8", "--data.batch_size", "16", "--precision", "float32")
CURVE_STEPS = 20
CURVE_BATCH = 4  # enough to compare losses; a CPU takes a second per sequence
_IGNORED = -100  # transformers' label for positions that are not predicted


def main() -> None:
    """Runs the comparison, prints it, and records it if requested."""
    flags, overrides = results.arguments(__doc__)
    if results.repeated(flags):
        return
    device = results.device()
    name, *chosen = ON_GPU if device == "cuda" else ON_CPU
    single = ["--mesh.data", "1", "--mesh.fsdp", "1"]
    run = ours.on_one_device(config.load(name, [*chosen, *single, *overrides]))
    still = dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, dropout=0.0),
        data=dataclasses.replace(run.data, batch_size=min(CURVE_BATCH, run.data.batch_size)),
    )
    batches = word_batches.masked(run.model, still.data.batch_size, CURVE_STEPS)
    (timed,) = word_batches.masked(run.model, run.data.batch_size, 1)
    model = run.model
    torch_training.compare(
        flags,
        f"mlm {model.layers}L/{model.heads}H/{model.hidden}D, V {model.vocab_size}, batch "
        f"{run.data.batch_size} x {model.sequence_length}, {run.precision}, against transformers "
        f"{transformers.__version__}",
        run,
        _Theirs,
        timed,
        curve_run=still,
        curve=batches,
        device=device,
        examples=run.data.batch_size * model.sequence_length,
        unit="tokens/s",
    )


class _Theirs:
    def __init__(self, run: config.Run, device: str) -> None:
        model = run.model
        settings = transformers.BertConfig(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            intermediate_size=model.ff_width,
            max_position_embeddings=model.sequence_length,
            hidden_dropout_prob=model.dropout,
            attention_probs_dropout_prob=model.dropout,
            layer_norm_eps=1e-12,
            pad_token_id=specials.PAD,
            attn_implementation="sdpa",
        )
        self.module = transformers.BertForMaskedLM(settings).to(device).train()
        # jaxtrain's position embeddings include the constant token-type embedding.
        token_types = self.module.bert.embeddings.token_type_embeddings.weight
        token_types.requires_grad_(False).zero_()
        called: Any = self.module
        if device == "cuda":
            torch._dynamo.reset()  # otherwise the second batch size compiles with dynamic shapes
            called = torch.compile(self.module, dynamic=False)
        self._training = torch_training.Training(
            self.module, lambda batch: called(**batch).loss, run.optim, autocast=device == "cuda"
        )
        self._device = device

    def load(self, params: Mapping[str, np.ndarray]) -> None:
        """Copies jaxtrain's parameters."""
        theirs = bert_weights.with_types(bert_weights.TABLE.outward(params), params)
        state = {name: torch.from_numpy(array.copy()) for name, array in theirs.items()}
        missing, unexpected = self.module.load_state_dict(state, strict=False)
        left = [name for name in missing if "token_type" not in name and "decoder" not in name]
        assert not left, f"parameters of transformers without a counterpart in jaxtrain: {left}"
        assert not unexpected, (
            f"parameters of jaxtrain without a counterpart in transformers: {unexpected}"
        )

    def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Returns token ids, attention mask and labels in the format of transformers."""
        labels = np.full(batch["tokens"].shape, _IGNORED, np.int64)
        np.put_along_axis(labels, batch["positions"], batch["targets"], axis=1)
        arrays = {
            "input_ids": batch["tokens"].astype(np.int64),
            "labels": labels,
        }
        if (batch["tokens"] == specials.PAD).any():  # without a mask, SDPA uses its fastest kernel
            arrays["attention_mask"] = (batch["tokens"] != specials.PAD).astype(np.int64)
        return torch_training.to_torch(arrays, self._device)

    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._training.step(batch)


if __name__ == "__main__":
    main()
