"""Building blocks that models share: layers, attention, convolution, losses, generation; CPUs."""
