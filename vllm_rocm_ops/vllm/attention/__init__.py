"""Serve decode attention in vLLM's backends, and the ops around attention."""
