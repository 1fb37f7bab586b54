"""Trained eviction: targets of future attention, boundary loss, scorers and their policies."""
