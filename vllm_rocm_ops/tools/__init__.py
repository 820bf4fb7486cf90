"""Implement the `vllm-rocm-ops` commands; the serving path imports none of them."""
