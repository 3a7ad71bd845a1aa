"""Readers of the journal: incidents, the report."""
