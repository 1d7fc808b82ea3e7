"""Weights in and out: safetensors, PyTorch files, folders of Hugging Face."""
