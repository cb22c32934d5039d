"""Why a hit was lost: what a request changed against the one before it, what that cost, and what would mend it."""
