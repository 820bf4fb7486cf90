"""Bugs in what the ops accept: bounds, strides, alignment, neighbors in memory."""

from ..bug import Bug, Tests

BUGS = (
    Bug(
        "a bound of strides that is too wide",
        "ops/standalone/flash.py",
        "of_value.slot_stride) < 2**24",
        "of_value.slot_stride) < 2**32",
        Tests("test_far_apart.py::test_bounds_of_strides"),
    ),
    Bug(
        "a launch of 2^32 threads",
        "core/launch.py",
        "max(threads) >= 2**32",
        "max(threads) > 2**32",
        Tests("test_rules.py::test_a_launch_of_a_row_per_block_is_bounded_on_both_sides"),
    ),
    Bug(
        "a launch that is planned whatever its size",
        "core/op.py",
        "if rule := launches.too_large(planned):",
        "if rule := launches.too_large(planned[1:]):",
        Tests("test_rules.py::test_no_planned_launch_is_larger_than_a_driver_takes"),
    ),
    Bug(
        "steps of heads that nobody aligns",
        "core/tensors.py",
        "if step is not None else tensor.stride()[:-1]",
        "if step is not None else ()",
        Tests("test_rules.py::test_steps_are_aligned_as_addresses_are"),
    ),
    Bug(
        "tensors that touch count as overlapping",
        "core/op.py",
        "if -before < distance < behind:",
        "if -before <= distance < behind:",
        Tests("test_contracts.py::test_neighbors_in_memory_are_no_overlap"),
    ),
    Bug(
        "tensors that touch behind count as overlapping",
        "core/op.py",
        "if -before < distance < behind:",
        "if -before < distance <= behind:",
        Tests("test_contracts.py::test_neighbors_in_memory_are_no_overlap"),
    ),
    Bug(
        "the stride of the residual for that of the input",
        "ops/shared/rowwise.py",
        "row_stride(a.addend) == strides[0]",
        "row_stride(a.addend) == strides[-1]",
        Tests("test_strides.py"),
    ),
)
