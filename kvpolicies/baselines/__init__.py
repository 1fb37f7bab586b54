"""Training-free policies that the field compares against, one file each."""
