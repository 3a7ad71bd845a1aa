"""Checkpoints that can be believed: saved whole, committed atomically, verified before use."""
