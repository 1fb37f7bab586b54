"""Whether two written answers have one value: read strictly, compare exactly, with a deadline."""
