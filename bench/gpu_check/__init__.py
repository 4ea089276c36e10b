"""`make gpu-check`: what only a GPU can show, in one short run."""
