"""Discovers the packages. The configs are at the top of a checkout and ship inside the package."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["jaxtrain", "jaxtrain.*"]), "jaxtrain.configs"],
    package_dir={"jaxtrain": "jaxtrain", "jaxtrain.configs": "configs"},
)
