"""`holdfast run`: torch elastic's agent, a meeting of nodes, and recovery that is decided once and ends."""
