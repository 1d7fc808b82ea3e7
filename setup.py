"""Discovers the packages. Configs and launch scripts ship inside the package, too."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["jaxtrain", "jaxtrain.*"]),
        "jaxtrain.configs",
        "jaxtrain.launch",
    ],
    package_dir={
        "jaxtrain": "jaxtrain",
        "jaxtrain.configs": "configs",
        "jaxtrain.launch": "launch",
    },
)
