"""Training of draft heads: prompts, self-generated text, the data on disk, the optimisation and its figures."""
