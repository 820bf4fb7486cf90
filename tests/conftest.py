"""What all tests share: no tuned tables but the shipped ones."""

import os

import pytest

os.environ["VLLM_ROCM_OPS_TABLES"] = os.devnull


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts vLLM's engines comes first: it takes longest, and the workers would wait for it in the end."""
    items.sort(key=lambda item: item.path.parent.name != "vllm")
