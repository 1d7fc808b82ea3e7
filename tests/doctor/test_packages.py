"""CUDA's wheels against the requirements of jax's plugin and of an installed torch."""

import pytest
from examined import all_ok, only_problem, only_warning
from recorded_packages import PLUGIN, TORCH_2_5, TORCH_2_9, WHEELS, environment

from jaxtrain.doctor import packages
from jaxtrain.doctor.requirements import Package


def test_the_versions_that_jax_requires_are_named() -> None:
    seen = all_ok(packages.plugin(environment()))
    assert seen.startswith("CUDA 12.9.79, cuDNN 9.28.0.42, NCCL 2.32.3: as jax-cuda12-plugin")


def test_no_plugin_is_fine_on_a_cpu() -> None:
    assert "uses only the CPU" in all_ok(packages.plugin({}.get))


def test_an_old_cudnn() -> None:
    found = only_problem(packages.plugin(environment({"nvidia-cudnn-cu12": "9.1.0.70"})))
    assert "nvidia-cudnn-cu12 is 9.1.0.70" in found.seen
    assert found.cure.endswith(" -m pip install 'nvidia-cudnn-cu12<10.0,>=9.8'")


def test_a_wheel_that_is_missing() -> None:
    found = only_problem(packages.plugin(environment(without="nvidia-nccl-cu12")))
    assert "requires nvidia-nccl-cu12, not installed" in found.seen
    assert found.cure.endswith(" -m pip install 'jax[cuda12]'")


def test_a_plugin_of_another_version_than_jaxlib() -> None:
    found = only_problem(packages.plugin(environment(jaxlib=Package("0.12.0"))))
    assert "jax-cuda12-plugin is 0.10.2, jaxlib is 0.12.0" in found.seen
    assert found.cure.endswith(" -m pip install --upgrade 'jax[cuda12]'")


def test_two_plugins() -> None:
    both = environment(**{"jax-cuda13-plugin": PLUGIN})
    found = only_problem(packages.plugin(both))
    assert "jax-cuda12-plugin and jax-cuda13-plugin" in found.seen
    assert "pip uninstall" in found.cure


def test_libraries_of_the_system() -> None:
    bare = {"jaxlib": Package("0.10.2"), "jax-cuda12-plugin": PLUGIN}
    assert "pip install 'jax[cuda12]'" in only_warning(packages.plugin(bare.get)).cure


def test_no_torch_and_a_torch_without_cuda() -> None:
    assert all_ok(packages.torch(environment())) == "no torch in this environment"
    cpu = environment(torch=Package("2.13.0+cpu", ("filelock",)))
    assert "does not conflict with jax" in all_ok(packages.torch(cpu))
    assert "jax does not use CUDA" in all_ok(packages.torch({"torch": TORCH_2_9}.get))


def test_a_torch_whose_pins_jax_accepts() -> None:
    pinned = {name: pin.removeprefix("==") for name, pin in TORCH_2_9.pins("nvidia-").items()}
    assert "jax accepts them" in all_ok(packages.torch(environment(pinned, torch=TORCH_2_9)))


def test_a_torch_that_pins_what_jax_cannot_use() -> None:
    """The one of the two that was installed first fails."""
    for wheels in (WHEELS, {"nvidia-cudnn-cu12": "9.1.0.70"}):
        found = only_problem(packages.torch(environment(wheels, torch=TORCH_2_5)))
        assert "nvidia-cudnn-cu12==9.1.0.70 (jax: <10.0,>=9.8)" in found.seen
        assert "nccl" not in found.seen
        assert "python -m venv" in found.cure


def test_a_torch_whose_wheels_were_replaced() -> None:
    found = only_warning(packages.torch(environment(torch=TORCH_2_9)))
    assert "nvidia-cudnn-cu12 is 9.28.0.42, torch requires ==9.10.2.21" in found.seen


def test_a_torch_for_another_cuda_installs_the_same_files() -> None:
    torch = Package("2.11.0", ("nvidia-nccl-cu13==2.28.9", "nvidia-cudnn-cu13==9.15.1.9"))
    wheels = {"nvidia-nccl-cu13": "2.28.9", "nvidia-cudnn-cu13": "9.15.1.9"}
    found = only_problem(packages.torch(environment(wheels, torch=torch)))
    assert "nvidia-nccl-cu12 and nvidia-nccl-cu13" in found.seen
    assert "install the same files" in found.seen


@pytest.mark.parametrize(("name", "major"), [("jax-cuda12-plugin", 12), ("jax-cuda13-plugin", 13)])
def test_the_cuda_that_jax_is_built_for(name: str, major: int) -> None:
    assert packages.cuda_major({name: PLUGIN}.get) == major
    assert packages.cuda_major({}.get) is None
