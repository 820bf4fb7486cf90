"""Garbage collections off, for a process that imports modules and then forks: they took a quarter of the imports."""

import gc

gc.disable()
