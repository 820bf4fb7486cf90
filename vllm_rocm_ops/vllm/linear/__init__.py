"""Linear layers: a file for each seam, and what they share."""
