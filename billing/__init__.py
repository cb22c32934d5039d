"""Price book, meter, ledger and reports: what each request cost, what the cache saved, and the proof."""
