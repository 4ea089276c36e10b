"""The worker: one process that owns one accelerator and serves a model speculatively."""
