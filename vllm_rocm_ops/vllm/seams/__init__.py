"""The seams: one file each, found by listing this folder, see ../seam.py."""
