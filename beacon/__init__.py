"""BeaconKV: farthest-point sampling, the continual query buffer, the policy and its ablations."""
