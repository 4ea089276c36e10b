"""Decode forwards captured once and replayed: shapes and inputs stay where they are, only the contents change."""
