"""Model code: loading a directory, the decoder, and its building blocks."""
