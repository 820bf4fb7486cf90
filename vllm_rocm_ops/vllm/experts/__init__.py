"""Layers of experts: a file for each seam, and what they share."""
