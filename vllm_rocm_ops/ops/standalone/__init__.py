"""Hold ops that no seam calls; only `ops`, `bench`, `verify` and `explain` reach them."""
