"""What `kvpolicies bench` measures: speed and memory of policies on one model."""
