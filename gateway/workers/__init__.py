"""Several processes on one port: one that looks after them, and what they tell each other."""
