"""The demonstration that ``keepwarm demo`` runs: a real agent, a real gateway, real engines, and a summary read back."""
