"""Models as text sees them: how a prompt becomes tokens, whoever asks."""
