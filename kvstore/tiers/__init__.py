"""The four tiers behind one contract (``kvstore.tiers.base``): device, host, disk, pool."""
