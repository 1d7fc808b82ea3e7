"""PSNR and SSIM compared with scikit-image.

Run by name, because scikit-image is an optional extra:

    python -m pytest tests/interop/skimage_quality.py
"""

import numpy as np
import pytest
from skimage import metrics

from jaxtrain.models.reconstruction import quality


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.2])
@pytest.mark.parametrize("size", [(16, 24), (48, 40)])
def test_psnr_and_ssim_equal_those_of_scikit_image(size: tuple[int, int], noise: float) -> None:
    rng = np.random.default_rng(0)
    video = rng.uniform(size=(2, 3, *size, 3)).astype(np.float32)
    video = (video + np.roll(video, 1, axis=3)) / 2  # adjacent pixels are similar, as in images
    other = np.clip(video + noise * rng.normal(size=video.shape), 0, 1).astype(np.float32)
    psnr, ssim = np.asarray(quality.psnr(video, other)), np.asarray(quality.ssim(video, other))
    for clip, frame in np.ndindex(2, 3):
        pair = video[clip, frame], other[clip, frame]
        if noise:
            wanted = metrics.peak_signal_noise_ratio(*pair, data_range=1)
            assert psnr[clip, frame] == pytest.approx(wanted, abs=1e-4)
        wanted = metrics.structural_similarity(
            *(image.astype(np.float64) for image in pair),
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
            channel_axis=-1,
            data_range=1,
        )
        assert ssim[clip, frame] == pytest.approx(wanted, abs=1e-4)
