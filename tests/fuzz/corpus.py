"""Creates small valid files of every kind that jaxtrain reads, once per work folder.

    python tests/fuzz/corpus.py FOLDER

Runs in a separate process, so that the harness never loads jax.
"""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
_DONE = "done"
TEXT = "once upon a time there was a time. largo, largo. paris is the capital of france. "
WORDS = ("paris", "is", "the", "capital", "of", "france", "a", "once", "upon", "time", ".")
GPT_WORDS = 290


def make(folder: Path, environment: dict[str, str]) -> Path:
    """Returns the folder of the corpus for this code; creates it if missing.

    Raises:
        RuntimeError: it cannot be created.
    """
    place = folder / f"corpus-{_code()}"
    if not (place / _DONE).exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        made = subprocess.run(
            [sys.executable, __file__, str(place)],
            env=os.environ | environment | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            raise RuntimeError(f"the corpus cannot be created:\n{made.stdout}\n{made.stderr}")
        (place / _DONE).touch()
    return place


def _code() -> str:
    """Returns a digest of jaxtrain and this file."""
    digest = hashlib.sha256()
    for path in sorted([*(CHECKOUT / "jaxtrain").rglob("*.py"), Path(__file__)]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _write(place: Path) -> None:
    for name, content in _texts().items():
        (place / name).write_bytes(content)
    _write_parquet(place / "text.parquet")
    _write_videos(place)
    _write_folders(place)
    _write_models(place)
    _write_pth(place)


def _texts() -> dict[str, bytes]:
    records = [{"text": f"{TEXT * 2}number {n}.", "id": n} for n in range(30)]
    return {
        "text.txt": "\n\n".join(f"{TEXT * 2} number {n}." for n in range(30)).encode(),
        "prompt.txt": TEXT.encode(),
        "text.jsonl": "".join(json.dumps(one) + "\n" for one in records).encode(),
        "list.jsonl": b'{"path": "a.mp4"}\n"b.mkv"\n',
        "list.csv": b"id,path\n1,a.mp4\n2,b.mkv\n",
        "list.txt": b"# videos\na.mp4\n\nb.mkv\n",
    }


def _write_parquet(path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    records = [{"text": f"{TEXT * 2}number {n}.", "id": n} for n in range(30)]
    parquet.write_table(pa.Table.from_pylist(records), path, row_group_size=10)


def _write_videos(place: Path) -> None:
    from data.video import sample_videos

    frames = sample_videos.busy(8, height=16, width=24)
    sample_videos.write(place / "video.mp4", frames, g="4")
    sample_videos.write(place / "video.mkv", frames, codec="ffv1", pix_fmt="bgr0")
    sample_videos.write(place / "video.webm", frames, codec="libvpx")
    from models.video_ae import small_autoencoder

    small_autoencoder.with_sound(place / "sound.mp4", frames, 0.3)
    with tarfile.open(place / "videos.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for name in ("video.mp4", "video.mkv"):
            tar.add(place / name, f"clips/{name}", filter=_plain)
        for name, content in (("clips/0.json", b"{}"), ("x" * 150 + ".mp4", b"no video" * 90)):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def _write_folders(place: Path) -> None:
    """Writes data folders as most runs use them, with several files."""
    for folder, names in (
        ("texts", ("text.txt", "text.jsonl", "text.parquet")),
        ("videos", ("video.mp4", "video.mkv", "sound.mp4")),
    ):
        (place / folder).mkdir()
        for name in names:
            shutil.copyfile(place / name, place / folder / name)


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Removes times and owners."""
    info.mtime = info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def _write_models(place: Path) -> None:
    """Writes a weights file, and if supported a transformers folder for each model."""
    import dataclasses

    import numpy as np
    import safetensors.numpy
    from flax import nnx
    from models.video_ae import small_autoencoder

    from jaxtrain import main
    from jaxtrain.data.text import byte_level, specials, tokenizer
    from jaxtrain.interop import huggingface, weights
    from jaxtrain.models import gpt, llama, mlm

    vocabulary = [*specials.NAMES, *WORDS]
    words = tokenizer.wordpiece({word: i for i, word in enumerate(vocabulary)})
    pieces = byte_level.train([TEXT] * 4, GPT_WORDS - 10)
    (place / "tokenizer.json").write_text(pieces.to_str())
    models: dict[str, tuple[Any, Any]] = {
        "video_ae": (small_autoencoder.config(), None),
        "mlm": (dataclasses.replace(mlm.Config.tiny(), vocab_size=len(vocabulary), ff=24), words),
        "gpt": (dataclasses.replace(gpt.Config.tiny(), vocab_size=GPT_WORDS), pieces),
        "llama": (dataclasses.replace(llama.Config.tiny(), vocab_size=GPT_WORDS), pieces),
    }
    for name, (model, tokens) in models.items():
        rng = np.random.default_rng(0)
        state = nnx.state(nnx.eval_shape(lambda model=model: model.build(nnx.Rngs(0))), nnx.Param)
        params = {
            ".".join(map(str, path)): rng.normal(0, 0.3, leaf.get_value().shape).astype(np.float32)
            for path, leaf in nnx.to_flat_state(state)
        }
        if name == "video_ae":
            params = small_autoencoder.params(model)
        weights.save(place / f"{name}.safetensors", model, params)
        if tokens is not None:
            huggingface.check_target(place / f"hf-{name}")
            huggingface.write(place / f"hf-{name}", model, params, tokens)
    stored = safetensors.numpy.load_file(place / "video_ae.safetensors")
    safetensors.numpy.save_file(stored, place / "published.safetensors")
    latents = place / "latents.safetensors"
    command = ["encode", place / "video_ae.safetensors", place / "video.mp4", latents]
    assert main.main([*map(str, command)]) == 0


def _write_pth(place: Path) -> None:
    try:
        import torch
    except ImportError:
        return
    import safetensors.numpy

    stored = safetensors.numpy.load_file(place / "published.safetensors")
    tensors = {name: torch.from_numpy(array) for name, array in stored.items()}
    torch.save(tensors, place / "published.pth")


if __name__ == "__main__":
    sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "tests")]
    os.chdir(sys.argv[1])
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    _write(Path(sys.argv[1]))
