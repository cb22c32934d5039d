"""Prefix repair: named policies, off by default, that undo what clients do to their own prefixes."""
