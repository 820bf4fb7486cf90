"""Norms, activations and quantizations: the pass on vLLM's graph, and the seams of what is not compiled."""
