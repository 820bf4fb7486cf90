"""Share code between ops: kernel families, contracts, cost models and cases."""
