"""What an engine is to keepwarm: adapters, prompts, wire formats, an engine of our own. Imports nothing."""
