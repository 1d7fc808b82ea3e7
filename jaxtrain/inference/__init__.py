"""A trained model in use: videos encoded and decoded, masks filled, text continued, quality."""
