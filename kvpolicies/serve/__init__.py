"""An OpenAI-compatible server over the one decode loop."""
