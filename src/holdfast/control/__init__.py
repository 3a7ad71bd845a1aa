"""The run's durable memory and who may act on it."""
