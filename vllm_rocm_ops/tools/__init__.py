"""The commands behind `vllm-rocm-ops`. Nothing that serves imports them."""
