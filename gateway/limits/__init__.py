"""Limits of the moment: requests and tokens a minute, and requests at once, by key, team and tenant."""
