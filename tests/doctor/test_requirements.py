"""Versions and requirements in the metadata of packages."""

import pytest

from jaxtrain.doctor import requirements
from jaxtrain.doctor.requirements import Package


@pytest.mark.parametrize(
    ("version", "clauses", "holds"),
    [
        ("9.28.0.42", "<10.0,>=9.8", True),
        ("9.1.0.70", "<10.0,>=9.8", False),
        ("10.0", "<10.0,>=9.8", False),
        ("9.8", ">=9.8.0", True),
        ("9.10.2.21", "==9.10.2.21", True),
        ("9.10.2.22", "==9.10.2.21", False),
        ("2.13.0+cpu", "==2.13.0", True),
        ("2.13.1", "==2.13.*", True),
        ("2.14.0", "==2.13.*", False),
        ("2.14.0", "!=2.13.*", True),
        ("1.4.7", "~=1.4.2", True),
        ("1.5", "~=1.4.2", False),
        ("1.4.1", "~=1.4.2", False),
        ("3.0", "", True),
        ("3.0", "@ file:///somewhere", True),
    ],
)
def test_clauses(version: str, clauses: str, holds: bool) -> None:
    assert requirements.satisfies(version, clauses) == holds


def test_requirements_of_old_and_new_metadata_are_read() -> None:
    package = Package(
        "2.5.1",
        (
            'nvidia-cudnn-cu12 (==9.1.0.70) ; platform_system == "Linux"',
            'nvidia-nccl-cu12==2.27.5; platform_system == "Linux" and platform_machine == "x86_64"',
            'nvidia-cublas-cu12<10.0,>=9.8; extra == "with-cuda"',
            "jax-cuda12-pjrt==0.10.2",
            "nvidia_nvtx",
        ),
    )
    assert package.pins("nvidia-") == {
        "nvidia-cudnn-cu12": "==9.1.0.70",
        "nvidia-nccl-cu12": "==2.27.5",
        "nvidia-cublas-cu12": "<10.0,>=9.8",
        "nvidia-nvtx": "",
    }


def test_packages_of_this_environment_are_found() -> None:
    jaxlib = requirements.installed("jaxlib")
    assert jaxlib is not None
    assert any(line.startswith("numpy") for line in jaxlib.requires)
    assert requirements.installed("no-such-package-at-all") is None
