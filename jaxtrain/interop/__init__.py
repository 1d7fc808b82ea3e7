"""Exchanges weights with other programs: safetensors, PyTorch, transformers, the Hugging Face Hub.

``weights`` reads any of them, ``huggingface`` writes folders for transformers, ``hub`` downloads
models from the Hub and publishes them there, and ``model_card`` writes the page that describes one.
"""
