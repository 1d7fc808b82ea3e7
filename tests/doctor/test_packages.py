"""CUDA's wheels against the requirements of jax's plugin."""

import pytest
from examined import all_ok, only_problem, only_warning
from recorded_packages import PLUGIN, environment

from jaxtrain.doctor import packages
from jaxtrain.doctor.packages import Package


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


@pytest.mark.parametrize(("name", "major"), [("jax-cuda12-plugin", 12), ("jax-cuda13-plugin", 13)])
def test_the_cuda_that_jax_is_built_for(name: str, major: int) -> None:
    assert packages.cuda_major({name: PLUGIN}.get) == major
    assert packages.cuda_major({}.get) is None


def test_an_installed_package_is_found() -> None:
    jaxlib = packages.installed("jaxlib")
    assert jaxlib is not None
    assert jaxlib.version
    assert packages.installed("no-such-package-at-all") is None
