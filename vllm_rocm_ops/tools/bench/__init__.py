"""How long ops take: cases, models' calls and lists of shapes (run.py), what is tuned (tune.py), and what else computes the same."""
