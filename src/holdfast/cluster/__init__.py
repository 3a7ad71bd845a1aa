"""What the scheduler says of the job, and what it can be asked. Torch-free; quiet where there is none."""
