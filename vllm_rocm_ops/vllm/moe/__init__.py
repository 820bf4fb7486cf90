"""Serve MoE layers: one file per seam, and their common code."""
