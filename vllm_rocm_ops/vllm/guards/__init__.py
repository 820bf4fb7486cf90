"""Seams that run no kernel: they keep a wrong configuration or a stale graph from being served."""
