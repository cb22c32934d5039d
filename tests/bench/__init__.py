"""Self-contained benchmarks, one module each with ``main(argv) -> int``."""
