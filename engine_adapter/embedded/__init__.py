"""The embedded engine: a small paged, continuously batching engine for Llama-family models. Imports nothing."""
