"""The demonstration that ``keepwarm demo`` runs: a real agent through a real gateway, and a summary read back."""
