"""Model complexity, layer attention scores, activation maps, and comparison of runs."""
