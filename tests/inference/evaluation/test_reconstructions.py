"""The meter and its statistics; the command is tested in tests/cli/test_evaluate.py."""

from jaxtrain.inference.evaluation import reconstructions


def measured(video: str, *values: float) -> reconstructions.ClipMetrics:
    return reconstructions.ClipMetrics(
        video=video, place=0.5, values=tuple({"psnr": value} for value in values)
    )


def test_clips_of_one_video_count_as_one() -> None:
    clips = [measured("a", 1, 2), measured("a", 3, 6), measured("b", 8, 8)]
    found = reconstructions.evaluation(clips, ["psnr", "ssim"])
    assert found.videos == 2
    assert list(found.estimates) == ["psnr"]  # no clip has an SSIM
    first, second = found.estimates["psnr"]
    assert (first.mean, first.count) == (5.0, 2)  # the mean of 2 and 8
    assert second.mean == 6.0  # the mean of 4 and 8
    assert found.differences["psnr"][0, 1].estimate.mean == 1.0


def test_an_interval_ends_where_the_metric_does() -> None:
    clips = [
        reconstructions.ClipMetrics(
            video=name, place=0.5, values=({"ssim": value, "lpips/alex": 1 - value},)
        )
        for name, value in (("a", 0.7), ("b", 1.0))
    ]
    found = reconstructions.evaluation(clips, ["ssim", "lpips/alex"])
    ((ssim,), (lpips,)) = found.estimates.values()
    assert ssim.high == 1.0
    assert lpips.low == 0.0
