"""The contests of AMD and GPU MODE's Inference Sprint: their problems, and a judge for ours or for a user's own file."""
