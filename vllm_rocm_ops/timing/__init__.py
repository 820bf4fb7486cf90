"""A model of how long kernels take on an AMD Instinct GPU. Its numbers are predictions, never measurements.

    machine = machines.named("MI300X")
    launch_time.predict(machine, trace.record(emulator, launch))

The emulator runs some blocks of a launch and leaves the instructions and addresses of their waves (trace.py). A compute unit runs
these again in time (compute_unit.py), with its memory behind it (hierarchy.py). A launch is the compute unit with most blocks, the
start and the end (launch_time.py). machines.py has every constant, its source, and whether it was measured, fitted or guessed.
The evidence for them is in the repository's tests/timing/.
"""

CONTEXT = 4096  # keys of a request, where nothing else is said
