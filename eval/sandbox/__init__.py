"""Code that a model wrote, run with nothing and never for long."""
