"""``./bench NAME [--json FILE]``: run one benchmark; without a name, list them."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path


def benchmarks() -> list[str]:
    """Return the names of the modules beside this one that are benchmarks."""
    names = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return sorted(name for name in names if not name.startswith("_") and not name.endswith(("_adapter", "_policy")))


def main(argv: list[str]) -> int:
    """Run the benchmark named first with the rest of the arguments."""
    if not argv or argv[0] not in benchmarks():
        print("usage: ./bench NAME [--json FILE]\n\nbenchmarks: " + ", ".join(benchmarks()), file=sys.stderr)
        return 2
    return int(importlib.import_module(f"tests.bench.{argv[0]}").main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
