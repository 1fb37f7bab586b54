"""Commands that run a model on prompts or traces, one file each."""
