"""Video autoencoder (TAEHV) from scratch on 64x64 crops, on one H100 (80 GB).

Validates and chooses the best checkpoint on complete clips of 12x480x720. As in TAEHV's published
recipe: crops, frames up to five apart, batches of 16, an adversary, and an average of the
parameters. Differs from it in Muon for kernels and in the initial parameters, which were better on
a small scale (docs/results.md), in having no teacher, and in 200,000 steps, 6 times as many. No run
on a GPU has been made yet.

Guide: docs/guides/video-autoencoder.md, "Crops". A specialist would use more than 20 validation
clips, which choose the best checkpoint, and evaluate with LPIPS: PSNR does not see what the
adversary gains.

    jaxtrain train taehv_h100_1 --data.path CLIPS
"""

from jaxtrain import config
from jaxtrain.models import video_ae

run = config.named("h100_8").override(
    {
        "model.init": "thumbnail",
        "model.reconstruction_weight": 1.0,
        "model.adversary": video_ae.Adversary(weight=1.0),
        "data.crop": (64, 64),
        "data.crops_per_clip": 4,
        "data.max_frame_delta": 5,
        "data.batch_size": 16,
        "optim.muon": config.Muon(peak_lr=2.5e-3),
        # Published: every 2 s, which are 8 steps at the published 242 steps per minute.
        "optim.average": config.Average(rule="ramp", decay=0.95, every=8),
        "optim.peak_lr": 3e-4,
        "optim.accumulate": 1,
        "mesh.fsdp": 1,
        "loop.steps": 200_000,  # published: 34,500, with a teacher
        "loop.log_every": 100,
        "loop.eval_every": 5000,
        "checkpoint.every": 5000,
        "checkpoint.keep": 5,
    }
)
