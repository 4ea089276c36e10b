"""Grafana dashboards as code, and the checks of dashboards and alerts on a real run (see `__main__`)."""
