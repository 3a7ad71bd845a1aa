"""In-process restart: after a fault the training function starts again in the same processes."""
