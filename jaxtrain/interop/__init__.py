"""Reads and writes weights: safetensors, PyTorch files and Hugging Face folders."""
