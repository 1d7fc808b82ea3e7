"""Video autoencoder (TAEHV) from scratch on 64x64 crops, on one H100 (80 GB).

TAEHV's published recipe (https://github.com/madebyollin/seraena): squares of 64 pixels up to the
complete frame, resized; frames up to five apart; batches of 16; an adversary; an average of the
parameters. tests/config/test_sources.py holds all of its values. Differs from it in Muon for
kernels and in the initial parameters, which were better on a small scale (docs/results.md), in
having no teacher, and in 200,000 steps, 6 times as many. Validates and chooses the best checkpoint
on complete clips of 13x480x720. No run on a GPU has been made yet.

Guide: docs/guides/video-autoencoder.md, "Crops". A specialist would evaluate with LPIPS, because
PSNR does not see what the adversary gains. On 8 GPUs: `--mesh.fsdp 8 --data.batch_size 64
--loop.steps 100000`.

    jaxtrain train taehv_h100_1 --data.path CLIPS
"""

from jaxtrain import config
from jaxtrain.models import video_ae

run = config.named("h100_8").override(
    {
        "model.init": "thumbnail",
        "model.reconstruction_weight": 1.0,
        # 16,384 windows as published: 256 for each of the 4 windows of 16 clips.
        "model.adversary": video_ae.Adversary(weight=1.0, replay=16_384),
        "data.crop": (64, 64),
        "data.min_crop_scale": 1.0,
        "data.max_crop_scale": 7.5,  # 480 pixels of a clip's 480 x 720
        "data.convert_on": "host",  # which shrinks crops before they are sent
        "data.flip": False,
        "data.crops_per_clip": 4,
        "data.max_frame_delta": 5,
        "data.batch_size": 16,
        "optim.muon": config.Muon(peak_lr=2.5e-3),
        # Published: every 2 s, which are 8 steps at the published 242 steps per minute.
        "optim.average": config.Average(rule="ramp", decay=0.95, every=8),
        "optim.peak_lr": 3e-4,
        "optim.max_grad_norm": None,
        "optim.accumulate": 1,
        "mesh.fsdp": 1,
        "loop.steps": 200_000,  # published: 34,500, with a teacher
        "loop.log_every": 100,
        "loop.eval_every": 5000,
        "checkpoint.every": 5000,
        "checkpoint.keep": 5,
    }
)
