"""What a run saves: written whole, verified, kept, found again. Orbax stays behind this package."""
