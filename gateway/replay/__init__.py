"""Replay of request traces through the production index and routing against simulated engines; see docs/design/0004."""
