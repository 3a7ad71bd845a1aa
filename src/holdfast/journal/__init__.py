"""The append-only record of a run's events and decisions."""
