"""Thought revisiting: which queries look far back, at what, and what policies lose by then."""
