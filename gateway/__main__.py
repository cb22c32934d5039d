"""``python -m gateway`` is ``keepwarm``."""

from gateway.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
