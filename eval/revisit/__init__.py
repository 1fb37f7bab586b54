"""Thought revisiting: which queries look far back, at what, and what each policy has lost by then."""
