"""The demonstration: a worker, a controller and sample traffic in phases, watched live (`make demo`)."""
