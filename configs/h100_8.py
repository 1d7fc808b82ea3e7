"""Video autoencoder, 13x480x720, on one node of 8 H100 (80 GB).

Parameters and optimizer state are sharded over the eight GPUs; each step gathers the parameters
once, in bfloat16. The guide that this follows has clips of 12 frames, of which the loss compares 9
(of 13 it compares all); 20 validation clips; and color jitter and blur, which its program does not
read.

Guide: docs/guides/video-autoencoder.md. A specialist would add LPIPS, whose weights you must have,
and the adversary: its section "Losses" has the command.

    jaxtrain train h100_8 --data.path CLIPS
"""

from jaxtrain import config
from jaxtrain.data import video
from jaxtrain.models import video_ae

run = config.Run(
    precision="bfloat16",
    model=video_ae.Config(
        frames=13,
        height=480,
        width=720,
        latent_channels=16,
        encoder_width=64,
        decoder_widths=(256, 128, 64, 64),
        reconstruction_weight=20.0,
    ),
    data=video.Config(
        batch_size=128,  # 8 clips x 8 GPUs x 2 microbatches
        train_split=0.95,
        max_frame_delta=2,
    ),
    optim=config.Optim(
        peak_lr=1e-4,
        schedule="cosine",
        warmup_steps=2000,
        b1=0.9,
        b2=0.95,
        eps=1e-8,
        weight_decay=1e-2,
        accumulate=2,
        max_grad_norm=1.0,
    ),
    mesh=config.Mesh(data=1, fsdp=8, shard="optimizer"),
    loop=config.Loop(
        steps=100_000,
        log_every=25,
        eval_every=1000,
        eval_examples=256,
        hang_timeout_s=3600.0,
    ),
    checkpoint=config.Checkpoint(every=2000, keep=100, best_metric="val/psnr"),
)
