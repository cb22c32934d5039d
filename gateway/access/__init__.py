"""Who may do what: tenants, teams, API keys and their limits in a store, and the log of every change to it."""
