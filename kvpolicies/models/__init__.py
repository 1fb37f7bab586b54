"""Models by name, the embedded one among them; prompts to tokens, and tokens to text."""
