"""Check of the container deployment on a real Docker engine."""
