"""Speculation: drafters, verify, plans, runtime states and their statistics."""
