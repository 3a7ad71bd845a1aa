"""What can be tried out about a machine: short probes with known answers."""
