"""The HTTP front and the composition root; the only package that knows all the others."""
