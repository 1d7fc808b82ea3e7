"""Video autoencoder with TAEHV's widths, on two CPU cores: its export opens in TAEHV and ComfyUI.

The same videos as `demo`, in crops of 32x32: these widths need 16 times the arithmetic. Validates
on complete clips.

Guide: docs/guides/comfyui.md. A specialist would train `taehv_h100_1` on a GPU, or start from
published weights.

    jaxtrain train demo_taehv
"""

from jaxtrain import config

run = config.named("demo").override(
    {
        "model.encoder_width": 64,
        "model.decoder_widths": (256, 128, 64, 64),
        "data.crop": (32, 32),
        "loop.steps": 80,
        "loop.log_every": 10,
        "loop.eval_every": 40,
        "checkpoint.every": 40,
    }
)
