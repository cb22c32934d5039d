"""A simulated fleet that breaks, in front of the production index, policy, load bookkeeping and breakers."""
