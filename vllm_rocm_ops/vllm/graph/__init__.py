"""Fuse norms, activations and quantizations: the pass on vLLM's graph, and the seams for eager code."""
