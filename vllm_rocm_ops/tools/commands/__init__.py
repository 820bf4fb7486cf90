"""The commands of `vllm-rocm-ops`, one a file: `add(parser)` adds its options, `run(...)` takes their values and prints."""
