"""`holdfast run`: torch elastic's agent and rendezvous, with recovery that is decided once and ends."""
