"""Rehearsed faults against real runs."""
