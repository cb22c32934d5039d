"""Pages and tiers: blocks and their names, KV pages, and the four places where they are kept warm."""
