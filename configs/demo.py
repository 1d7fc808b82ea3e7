"""Video autoencoder, small, on two CPU cores: one to two minutes, no data needed.

Trains on moving scenes, rendered and encoded once; set `--data.path` to use your own videos.

Guide: docs/tutorials/first-run.md, then docs/guides/video-autoencoder.md. A specialist would train
for longer: `--loop.steps 1280` reached 31.5 dB. For 12,000 steps, `--optim.muon.peak_lr 0.0025` is
better (docs/results.md).

    jaxtrain train demo
"""

from jaxtrain import config

run = config.named("h100_8").override(
    {
        "precision": "float32",  # CPUs compute bfloat16 slowly
        "model.frames": 5,
        "model.height": 64,
        "model.width": 64,
        "model.encoder_width": 16,
        "model.decoder_widths": (64, 32, 16, 16),
        "model.init": "thumbnail",  # colors from the first step: so few steps do not learn them
        "data.demo": True,
        "data.batch_size": 2,
        "data.train_split": 0.8,
        "optim.peak_lr": 1e-3,
        "optim.muon": config.Muon(peak_lr=0.005),
        "optim.warmup_steps": None,
        "optim.warmup_fraction": 1 / 16,
        "optim.accumulate": 1,
        "mesh.fsdp": 1,
        "loop.steps": 256,
        "loop.log_every": 16,
        "loop.eval_every": 128,
        "loop.eval_examples": 16,
        "loop.hang_timeout_s": 600.0,
        "checkpoint.every": 128,
        "checkpoint.keep": 2,
    }
)
