"""`make bench-worker`: the default model end to end: fixed depths, steered by the controller, and beside peers."""
