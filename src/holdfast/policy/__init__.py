"""Pure decisions: history in, decision out. Nothing here has effects or imports what has."""
