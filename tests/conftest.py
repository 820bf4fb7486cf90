"""What all tests share: no tuned tables but the shipped ones."""

import os

import pytest

os.environ["VLLM_ROCM_OPS_TABLES"] = os.devnull


LONGEST = (
    *("test_planted_bugs", "test_ops", "test_generation", "test_fused_experts_tiled", "test_serve", "test_seams"),
    *("test_build", "test_patches", "test_scaled_mm_tiled", "test_large_tensors", "test_selection", "test_cli"),
)
"""Files that take longest, from minutes to half of one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, or workers would wait for it in the end."""
    place = {stem: place for place, stem in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))
