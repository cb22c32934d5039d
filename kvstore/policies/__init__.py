"""Eviction policies, each in a file of its own behind ``kvstore.policy.EvictionPolicy``."""
