"""Define the `vllm-rocm-ops` commands, one per file: `add(parser)` adds the options, `run(...)` prints and returns the exit code."""
