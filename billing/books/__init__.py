"""Price books that come with the package, as TOML."""
