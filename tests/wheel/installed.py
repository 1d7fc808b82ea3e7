"""Tests an installed wheel from an empty folder.

    cd "$(mktemp -d)" && VENV/bin/python -I PATH/tests/wheel/installed.py

Requires only the wheel's dependencies, so an import without a declared dependency fails.
"""

import importlib
import importlib.metadata
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

# Installed only by extras; modules may import them.
EXTRAS = {"torch", "diffusers", "transformers", "wandb", "trackio", "mlflow"}
CHECKOUT = Path(__file__).resolve().parents[2]
PROGRAM = Path(sysconfig.get_path("scripts")) / "jaxtrain"
# `demo`, reduced to seconds: the same renderer, codec, pipeline and step.
SMALL = (
    *("--model.frames", "4", "--model.height", "16", "--model.width", "16"),
    *("--model.encoder_width", "8", "--model.decoder_widths", "16", "8", "8", "8"),
    *("--loop.steps", "4", "--loop.log_every", "1", "--loop.eval_every", "4"),
    *("--checkpoint.every", "2"),
)


def check(what: bool, problem: str) -> None:
    if not what:
        sys.exit(f"error: {problem}")


def jaxtrain(*arguments: str) -> str:
    """Runs the installed program, which must succeed; returns its output."""
    found = subprocess.run(
        [str(PROGRAM), *arguments], capture_output=True, text=True, timeout=1500, check=False
    )
    line = f"jaxtrain {' '.join(arguments)}"
    check(
        found.returncode == 0, f"{line} failed with exit code {found.returncode}:\n{found.stderr}"
    )
    return found.stdout


def import_everything() -> int:
    """Imports all modules of the package; returns their number."""
    package = importlib.import_module("jaxtrain")
    where = Path(str(package.__file__)).resolve()
    check(
        CHECKOUT not in where.parents,
        f"jaxtrain is imported from the checkout, not from a wheel: {where}",
    )
    broken, count = [], 0
    for module in pkgutil.walk_packages(package.__path__, "jaxtrain.", onerror=broken.append):
        if module.name.endswith(".__main__"):
            continue
        count += 1
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in EXTRAS:
                broken.append(f"{module.name}: {error}")
        except Exception as error:
            broken.append(f"{module.name}: {type(error).__name__}: {error}")
    check(not broken, "modules that cannot be imported:\n" + "\n".join(broken))
    return count


def main() -> None:
    check(not list(Path().iterdir()), f"{Path().resolve()} is not empty")
    count = import_everything()
    print(f"{count} modules imported")

    version = importlib.metadata.version("jaxtrain")
    printed = jaxtrain("--version")
    check(version in printed, f"jaxtrain --version prints {printed!r} instead of {version}")
    print(printed.strip())

    shipped = {path.stem for path in (CHECKOUT / "configs").glob("[a-z]*.py")}
    listed = {line.split()[0] for line in jaxtrain("configs", "list").splitlines()}
    check(listed == shipped, f"configs list differs from configs/: {sorted(listed ^ shipped)}")

    jaxtrain("train", "demo", *SMALL, "--output-dir", "run")
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["train/loss"] for record in records if "train/loss" in record}
    check(
        sorted(losses) == [1, 2, 3, 4],
        f"metrics.jsonl has steps {sorted(losses)} instead of 1 to 4",
    )
    check(Path("run/checkpoints/4.json").is_file(), "no checkpoint of step 4")
    jaxtrain("report", "run", "--out", "page.html")
    page = Path("page.html").read_text()
    # Styles and scripts are data files of the package, which a wheel may omit.
    folder = CHECKOUT / "jaxtrain" / "reporting"
    for asset in (*folder.glob("*.css"), *folder.glob("*.js")):
        line = max(asset.read_text().splitlines(), key=len).strip()
        check(line in page, f"the report does not contain {asset.name}")
    print(f"trained, saved and reported: losses {[round(loss, 4) for loss in losses.values()]}")
    follow_readme()


def follow_readme() -> None:
    """Runs the commands of the README's first task, on the demo's videos."""
    text = (CHECKOUT / "README.md").read_text()
    block = re.search(r"<!-- the five commands.*?```sh\n(.*?)```", text, re.DOTALL)
    check(block is not None, "README.md has no five commands")
    install, *commands = block[1].splitlines()  # type: ignore[index]
    check("pip install" in install, f"README.md begins with {install!r}")
    videos = sorted(Path(os.environ["JAXTRAIN_CACHE"]).glob("demo_video*/*.mp4"))
    check(len(videos) > 9, f"the cache has {len(videos)} videos of the demo")
    Path("videos").mkdir()
    for video in videos:
        shutil.copy(video, "videos")
    for command in commands:
        began = time.perf_counter()
        printed = jaxtrain(*command.removeprefix("jaxtrain ").split())
        print(f"{command}: {time.perf_counter() - began:.0f} s")
    print(printed.splitlines()[-1])
    check_comfyui(Path("taehv.safetensors"))


def check_comfyui(path: Path) -> None:
    """Checks names and shapes against those of the network that ComfyUI builds."""
    import safetensors

    expected = json.loads((CHECKOUT / "tests/fixtures/taehv_loaders.json").read_text())["arrays"]
    sizes = {"latents": 16, "pixels": 3, "pool0": 64 * 2, "pool1": 64 * 2, "pool2": 64}
    sizes |= {"grow0": 256, "grow1": 128 * 2, "grow2": 64 * 2}
    shapes = {name: [sizes.get(size, size) for size in shape] for name, shape in expected.items()}
    with safetensors.safe_open(path, "np") as file:
        found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    check(found == shapes, f"{path} has other arrays than ComfyUI's network")


if __name__ == "__main__":
    main()
