"""Published protocols for the quality of video autoencoders, with their published results."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """The published results of a model; None for a metric that was not published."""

    model: str
    psnr: float
    ssim: float | None
    lpips: float
    rfvd: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocol:
    """How clips are chosen, and what others measured on them.

    Attributes:
        about: the data set and the clips, for the console.
        frames, height, width: size of a clip.
        fps: frame rate of the clips, approximated by taking every n-th frame; None takes every one.
        complete: whether each video is divided into clips, the last one filled by repeating its
            last frame; otherwise a video has one clip, at its beginning.
        lpips: network of the published LPIPS.
    """

    about: str
    frames: int
    height: int
    width: int
    fps: float | None
    complete: bool
    lpips: str
    source: str
    published: tuple[Published, ...]


def _mcl_jcv(
    name: str, channels: int, psnr: float, ssim: float, lpips: float, rfvd: float
) -> Published:
    model = f"{name}, {channels} channels"
    return Published(model=model, psnr=psnr, ssim=ssim, lpips=lpips, rfvd=rfvd)


PROTOCOLS = {
    "mcl-jcv": Protocol(
        about="the 30 videos of MCL-JCV, divided into clips",
        frames=17,
        height=256,
        width=256,
        fps=30,
        complete=True,
        lpips="vgg",  # vidtok/modules/lpips.py
        source="https://github.com/microsoft/VidTok (README, Performance), and for other networks "
        "its authors' https://arxiv.org/abs/2412.13061 (Table 1)",
        published=(
            _mcl_jcv("VidTok 4x8x8", 4, 29.64, 0.852, 0.114, 194.2),
            _mcl_jcv("VidTok 4x8x8", 8, 31.83, 0.897, 0.083, 109.3),
            _mcl_jcv("VidTok 4x8x8", 16, 35.04, 0.942, 0.047, 78.9),
            _mcl_jcv("VidTok 2x8x8", 8, 33.86, 0.928, 0.057, 80.7),
            _mcl_jcv("VidTok 4x4x4", 4, 34.78, 0.941, 0.051, 87.2),
            _mcl_jcv("VidTok 4x16x16", 4, 25.05, 0.711, 0.228, 549.1),
            _mcl_jcv("CV-VAE 4x8x8", 4, 28.56, 0.823, 0.163, 334.2),
            _mcl_jcv("Open-Sora 1.2 4x8x8", 4, 29.44, 0.766, 0.164, 350.7),
            _mcl_jcv("Open-Sora Plan 1.2 4x8x8", 4, 29.07, 0.839, 0.131, 201.7),
            _mcl_jcv("CogVideoX 4x8x8", 16, 33.76, 0.930, 0.076, 93.2),
            _mcl_jcv("Cosmos-CV 4x8x8", 16, 31.27, 0.817, 0.149, 153.7),
        ),
    ),
    "open-sora-plan": Protocol(
        about="the test videos of Panda-70M, the first frames of each",
        frames=33,
        height=256,
        width=256,
        fps=None,
        complete=False,
        lpips="alex",  # PKU-YuanGroup/WF-VAE#21
        source="https://github.com/PKU-YuanGroup/Open-Sora-Plan (docs/Report-v1.3.0.md)",
        published=(
            Published(model="OD-VAE, 4 channels", psnr=30.311, ssim=None, lpips=0.043, rfvd=None),
            Published(model="WF-VAE-S, 4 channels", psnr=30.579, ssim=None, lpips=0.044, rfvd=None),
            Published(model="WF-VAE-S, 8 channels", psnr=31.764, ssim=None, lpips=0.050, rfvd=None),
        ),
    ),
}
"""By the name that ``evaluate --protocol`` takes."""
