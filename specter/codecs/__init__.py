"""How the weights of an expert are stored."""
