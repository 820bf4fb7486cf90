"""Models: configurations that are shipped, the layers of a step, and arguments of their sizes."""
