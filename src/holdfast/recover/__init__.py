"""`holdfast recover`: the recovery runbook as a program."""
