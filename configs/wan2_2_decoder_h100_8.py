"""Wan 2.2's decoder, fine-tuned on your clips at 17x480x768 on one node of 8 H100 (80 GB).

Starts from the published weights. The encoder stays as it is, so diffusion models that make its
latents keep working. No run has been made yet. The width is not 704 because XLA's GPU compiler,
without autotuning, fails at 480x704 (jax 0.10.2).

Guide: docs/guides/video-autoencoder.md, "Fine-tune the big autoencoder". A specialist would add
LPIPS and the adversary (the guide has the command), and look at the worst clips: no run has shown
yet that these rates are the best.

    jaxtrain train wan2_2_decoder_h100_8 --data.path CLIPS --model.init_from VAE
"""

from jaxtrain import config
from jaxtrain.data import video
from jaxtrain.models import wan_vae

run = config.Run(
    precision="bfloat16",
    model=wan_vae.Config(frames=17, height=480, width=768, remat="block"),
    data=video.Config(
        batch_size=32,  # 2 clips x 8 GPUs x 2 microbatches
        train_split=0.95,
        max_frame_delta=1,
    ),
    optim=config.Optim(
        peak_lr=1e-5,  # the decoder is good already
        schedule="cosine",
        warmup_steps=200,
        b1=0.9,
        b2=0.95,
        eps=1e-8,
        weight_decay=1e-2,
        accumulate=2,
        max_grad_norm=1.0,
    ),
    mesh=config.Mesh(data=1, fsdp=8, shard="optimizer"),
    loop=config.Loop(
        steps=5000,
        log_every=10,
        eval_every=250,
        eval_examples=256,
        hang_timeout_s=3600.0,
    ),
    checkpoint=config.Checkpoint(every=250, keep=3, best_metric="val/psnr"),
)
