"""Uses trained models: encode and decode videos, fill masks, generate text, measure quality."""
