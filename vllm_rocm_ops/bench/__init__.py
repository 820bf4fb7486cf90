"""How long ops take: cases and models' calls (run.py), all configurations of them (tune.py), and what else computes the same."""
