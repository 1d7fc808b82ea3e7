"""Videos are written with the same bytes on any machine, with their sound, or not at all."""

import errno
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from models.video_ae import small_autoencoder

from jaxtrain.errors import InputError, RunAgain
from jaxtrain.inference.video import reading, writing
from jaxtrain.inference.video.reading import Frame


def test_the_bytes_do_not_depend_on_memory_addresses_or_cores(tmp_path: Path) -> None:
    """Of repeated files, 1% to 2% would differ, so this checks the encoder's options."""
    with writing.writing(
        tmp_path / "a.mp4", rate=Fraction(25), time_base=Fraction(1, 25), crf=16
    ) as out:
        out.add(Frame(np.zeros((32, 32, 3), np.uint8), 0))
        assert out._options["x264-params"] == "cpu-independent=1"
        assert out._stream.codec_context.thread_count == 8


EACH: dict[str, Any] = {"rate": Fraction(25), "time_base": Fraction(1, 25), "crf": 30}


def frame(number: int) -> Frame:
    return Frame(np.full((32, 32, 3), 40, np.uint8), number)


def write_and_fail(path: Path, error: Exception | None) -> None:
    with writing.writing(path, **EACH) as out:
        out.add(frame(0))
        if error is not None:
            raise error


def no_space() -> Exception:
    """Returns PyAV's error, which cannot be given another file name."""
    with pytest.raises(OSError, match="No space left") as raised:
        av.error.err_check(-errno.ENOSPC, "a.mp4")
    return raised.value


def test_a_full_disk_is_one_line_with_the_fix(tmp_path: Path) -> None:
    match = r"a.mp4 cannot be written \(No space left on device\): free"
    with pytest.raises(RunAgain, match=match):
        write_and_fail(tmp_path / "a.mp4", no_space())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("first", [InputError("the input is broken"), None])
def test_an_error_of_closing_is_explained_and_replaces_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: Exception | None
) -> None:
    opened = av.open

    class Broken:
        def __init__(self, container: Any) -> None:
            self._container = container

        def __getattr__(self, name: str) -> Any:
            return getattr(self._container, name)

        def close(self) -> None:
            self._container.close()
            raise no_space()

    monkeypatch.setattr(av, "open", lambda *given, **more: Broken(opened(*given, **more)))
    kind, match = (RunAgain, "No space") if first is None else (InputError, "broken")
    with pytest.raises(kind, match=match):
        write_and_fail(tmp_path / "a.mp4", first)
    assert list(tmp_path.iterdir()) == []


def copy(video: reading.Video, target: Path) -> None:
    """Writes the frames and the sound of a video."""
    with writing.writing(
        target, rate=video.rate, time_base=video.time_base, crf=30, sound_of=video
    ) as out:
        for item in video.items(sound=True):
            if isinstance(item, Frame):
                out.add(item)
            else:
                out.copy(item)


@pytest.mark.parametrize(
    ("source", "suffix"),
    [
        *(("avi pcm_s16le", "mp4"), ("mkv pcm_s16le", "mov"), ("mkv flac", "mp4")),
        *(("mkv flac", "mov"), ("mkv libopus", "mov"), ("mkv aac", "mkv"), ("mp4 aac", "mov")),
    ],
)
def test_sound_is_kept_or_refused_before_the_work(tmp_path: Path, suffix: str, source: str) -> None:
    container, codec = source.split()
    path, target = tmp_path / f"in.{container}", tmp_path / f"out.{suffix}"
    small_autoencoder.with_sound(path, [frame(0).pixels] * 25, 1.0, codec)
    if suffix == "mov" and codec in ("flac", "libopus"):
        with pytest.raises(InputError, match=r"\.mov does not support the audio codec \w+: choose"):
            copy(reading.Video(path), target)
        return
    copy(reading.Video(path), target)
    with av.open(str(target)) as made:
        assert made.streams.audio[0].codec_context.channels == 1
        parts = [one for one in made.demux(audio=0) if one.size]
    duration_s = sum(float((one.duration or 0) * one.time_base) for one in parts if one.time_base)
    assert duration_s == pytest.approx(1.0, abs=0.1)


def test_interlaced_videos_keep_their_sound(tmp_path: Path) -> None:
    images = [np.full((32, 32, 3), 8 * number, np.uint8) for number in range(25)]
    tff = {"x264-params": "tff=1"}
    path = small_autoencoder.with_sound(tmp_path / "in.mp4", images, 1.0, options=tff)
    copy(reading.Video(path), tmp_path / "out.mp4")
    before, after = (
        [*reading.Video(file).items(sound=True)] for file in (path, tmp_path / "out.mp4")
    )
    assert sum(isinstance(item, Frame) for item in after) == 25
    assert len(after) == len(before) > 35


@pytest.mark.parametrize(("suffix", "start_s"), [("mov", 0), ("mp4", 72_000), ("mkv", 3)])
def test_outputs_start_at_zero_and_keep_the_offset_of_the_sound(
    tmp_path: Path, suffix: str, start_s: int
) -> None:
    """The sound of a transport stream starts 0.2 s before its first frame."""
    path, base = tmp_path / "in.ts", Fraction(1, 90_000)
    with av.open(str(path), "w", format="mpegts") as container:
        stream: Any = container.add_stream("libx264", rate=25, options={"bf": "0"})
        stream.height = stream.width = 32
        stream.pix_fmt, stream.codec_context.time_base = "yuv420p", base
        sound: Any = container.add_stream("mp2", rate=48_000)
        sound.layout = "mono"
        for first in range(0, 48_000, 1152):
            wave = np.zeros((1, 1152), np.int16)
            audio = av.AudioFrame.from_ndarray(wave, "s16", "mono")
            audio.rate, audio.pts, audio.time_base = (
                48_000,
                first + start_s * 48_000,
                Fraction(1, 48_000),
            )
            container.mux(sound.encode(audio))
        for number in range(25):
            image = av.VideoFrame.from_ndarray(frame(0).pixels, "rgb24")
            image.pts, image.time_base = 90_000 * start_s + 18_000 + 3600 * number, base
            container.mux(stream.encode(image))
        container.mux(stream.encode())
        container.mux(sound.encode())
    video, target = reading.Video(path), tmp_path / f"out.{suffix}"
    copy(video, target)
    with av.open(str(target)) as made:
        picture, tone = made.streams.video[0], made.streams.audio[0]
        begins = [float((one.start_time or 0) * one.time_base) for one in (picture, tone)]
        assert made.duration / av.time_base < 1.5
    assert min(begins) == pytest.approx(0, abs=0.03)
    assert begins[0] - begins[1] == pytest.approx(0.2, abs=0.03)


def test_joined_recordings_with_sound_can_be_written(tmp_path: Path) -> None:
    one = small_autoencoder.with_sound(tmp_path / "1.ts", [frame(0).pixels] * 25, 1.0)
    path = tmp_path / "joined.ts"
    path.write_bytes(one.read_bytes() * 2)
    video, target = reading.Video(path), tmp_path / "out.mp4"
    copy(video, target)
    with av.open(str(target)) as made:
        assert made.duration / av.time_base == pytest.approx(
            2.0, abs=0.25
        )  # AAC adds its own silence
        assert len(list(made.decode(video=0))) == 50


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_sound_that_an_edit_list_hides_is_not_heard(tmp_path: Path, suffix: str) -> None:
    path = small_autoencoder.with_sound(tmp_path / "in.mp4", [frame(0).pixels] * 50, 2.0)
    data = bytearray(path.read_bytes())
    place = data.rindex(b"elst") + 12  # of the sound: duration, first sample, rate
    (whole,) = struct.unpack_from(">I", data, place)  # 2 s, in units of the movie
    struct.pack_into(">Ii", data, place, whole * 7 // 10, 1024 + int(0.6 * 16_000))
    path.write_bytes(data)
    target = tmp_path / f"out.{suffix}"
    copy(reading.Video(path), target)
    with av.open(str(target)) as made:
        samples = sum(one.samples for one in made.decode(audio=0))
    assert samples / 16_000 == pytest.approx(1.4, abs=0.15)
