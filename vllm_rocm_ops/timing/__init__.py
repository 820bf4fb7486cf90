"""Predict how long kernels take on AMD Instinct GPUs. The numbers are predictions, never measurements.

    machine = machines.named("MI300X")
    launch_time.predict(machine, trace.record(emulator, launch))

The emulator runs some blocks of a launch and records the instructions and addresses of their waves (trace.py). A model of a compute unit
(compute_unit.py) and its memory (hierarchy.py) replays them with timing. A launch takes as long as its busiest compute unit, plus start
and end (launch_time.py). machines.py lists every constant with its source, and whether it was measured, fitted or guessed.
serving_benchmarks/timing_study/ in the repository has the evidence, and predicts decode steps.
"""

CONTEXT = 4096  # default keys per request
