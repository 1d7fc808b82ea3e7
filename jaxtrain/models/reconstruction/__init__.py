"""What all video autoencoders share: clips, losses, metrics, samples, and streams of frames.

Reading order: `reconstruction.py`, then what it uses: `losses.py` (sections of the config),
`timing.py` (which frames a latent stands for), `lpips.py`, `adversary.py` with its
`replay_buffer.py`, `layers.py`, `quality.py`, and `samples.py`. `streaming.py` processes videos of
any length. The networks are in :mod:`..video_ae` and :mod:`..wan`.
"""
