"""Building blocks of models: layers, initializers, attention, convolution, losses, generation."""
