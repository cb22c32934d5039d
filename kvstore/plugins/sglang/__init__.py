"""SGLang's HiCache over this store: ``hicache.Keepwarm`` is what ``--hicache-storage-backend dynamic`` loads.

See ``docs/sglang.md`` for the flags, and the package's README for what is where.
"""
