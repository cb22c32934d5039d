"""Sample data that several tests share."""
