"""Keep a wrong configuration or a stale graph from being served. These seams run no kernel."""
