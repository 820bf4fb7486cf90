"""Attention's decode: the backends of vLLM that ours serve in, and what lies around attention."""
