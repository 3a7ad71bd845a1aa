"""The `holdfast` command. No logic of its own: each command calls the room that owns it."""
