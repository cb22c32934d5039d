"""vLLM's KV connector over this store: ``connector.Keepwarm`` is what ``--kv-transfer-config`` loads.

See ``docs/vllm.md`` for the flags, and the package's README for what is where.
"""
