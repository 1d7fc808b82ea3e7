"""Runs ``python -m jaxtrain``, which is the same as ``python -m jaxtrain.main``."""

from jaxtrain.main import console

if __name__ == "__main__":
    console()
