"""Several processes: how they meet, agree, notice one another's end, and stop together."""
