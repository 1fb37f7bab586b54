"""Training of the embedded model, from a seed."""
