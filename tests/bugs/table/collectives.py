"""Bugs in the all-reduce, its calls, and the measurements and choices that vLLM's ranks share."""

from ..bug import Bug, Tests

ROWS, HEADER = "collectives/all_reduce.h", "collectives/one_shot.h"
GRAPH, REDUCED, MEASURED = (
    f"vllm/{file}.py" for file in ("graph/rewrite", "graph/all_reduce_norm", "graph/all_reduce_timing")
)


def _ranks(*tests: str, module: str = "all_reduce") -> Tests:
    return Tests(*(f"emulator/test_all_reduce.py::{test}" for test in tests), module=module)


def _exchange() -> Tests:
    """Return the test of rows in several blocks whose kernels exchange sums and maxima."""
    return _ranks("test_blocks_exchange_sums_and_maxima", module="all_reduce_quant")


def _engine(*tests: str) -> Tests:
    return Tests(*(f"vllm/test_reduced_norms.py::{test}" for test in tests))


BUGS = (
    Bug(
        "a sum that is not rounded before a norm with two outputs",
        ROWS,
        "// All-reduce and RMSNorm, stored or quantized.",
        "template <class T> constexpr bool kRoundsSum<BesideNorm<T>> = false;",
        _ranks("test_the_bits_of_two_ops", module="all_reduce_group_quant"),
    ),
    Bug(
        "an addend of the first chunk only",
        ROWS,
        "if (rows.addend) own[i]",
        "if (rows.addend && i == 0) own[i]",
        _ranks("test_addends_of_long_rows"),
    ),
    Bug(
        "an addend of the first row only",
        ROWS,
        "(const u16*)rows.addend + i64(row) * rows.input_stride",
        "(const u16*)rows.addend",
        _ranks("test_options", module="all_reduce_group_quant"),
    ),
    Bug(
        "an addend without its factor before vLLM's all-reduce",
        "collectives/launches.py",
        "torch.add(a.input, a.addend, alpha=a.addend_factor)",
        "a.input + a.addend",
        _engine("test_a_sum_before_the_all_reduce"),
    ),
    Bug(
        "an all-reduce's sum for its input",
        GRAPH,
        'given["input"] = summed.args[0]',
        "pass",
        _engine("test_a_sum_before_the_all_reduce"),
    ),
    Bug(
        "an all-reduce apart from a norm with two outputs",
        "vllm/moe/quantized_input.py",
        "insert(norm, OP, given, [], summed(norm, OP, given), makes)[:3]",
        "insert(norm, OP, given, [], None, makes)[:3]",
        _engine("test_a_norm_that_also_quantizes_for_experts"),
    ),
    Bug(
        "a norm with two outputs checked as one with one",
        MEASURED,
        "[y] * (2 if self.op is launches.BOTH else 1)",
        "[y]",
        _engine("test_ranks_measure_together_and_agree"),
    ),
    Bug(
        "the sum of squares of a block for its row's",
        ROWS,
        "if (rows.parts == 1) return reduce_block",
        "return reduce_block",
        _ranks("test_the_bits_of_two_ops", module="all_reduce_group_quant"),
    ),
    Bug(
        "the maximum of a block for its row's",
        "device/row_output.h",
        "absmax_to_bounded_scale(of_row.reduce(thread_absmax,",
        "absmax_to_bounded_scale(reduce_block(thread_absmax,",
        _exchange(),
    ),
    Bug(
        "a row's maximum in the place of its sum",
        ROWS,
        "constexpr u32 kExchange<Max> = 1;",
        "constexpr u32 kExchange<Max> = 0;",
        _exchange(),
    ),
    Bug(
        "two rows' sums in one place",
        ROWS,
        "exchange = row * kExchanges + kExchange<Combine>;",
        "exchange = kExchange<Combine>;",
        _exchange(),
    ),
    Bug(
        "two blocks' waves in one place",
        ROWS,
        "first_thread / wave::kLanes + wave::index()",
        "wave::index()",
        _exchange(),
    ),
    Bug(
        "a row's last wave counted more than once",
        ROWS,
        "from < waves ? other : identity",
        "other",
        _exchange(),
    ),
    Bug(
        "words awaited beyond a row",
        ROWS,
        "index[i] = at < rows.chunks ? at : rows.chunks - 1;",
        "index[i] = at;",
        _ranks("test_sizes"),
    ),
    Bug(
        "a row's last chunk counted more than once",
        ROWS,
        "input[i] = of.in_bounds[i] ? sums[i] : u32x4{};",
        "input[i] = sums[i];",
        _ranks("test_sizes"),
    ),
    Bug(
        "the first row's residual for all",
        ROWS,
        "(u16*)norm.residual + index * residual_stride",
        "(u16*)norm.residual",
        _ranks("test_every_kind"),
    ),
    Bug(
        "an error hidden from the host",
        HEADER,
        "  mem::store_system(group.report, error | u64(epoch) << 32);\n",
        "",
        _ranks("test_a_rank_that_never_comes"),
    ),
    Bug(
        "a rank not told of an error",
        HEADER,
        "if (peer < group.ranks) mem::store_system(group.inbox[peer], error);",
        "if (peer == group.rank) mem::store_system(group.inbox[peer], error);",
        _ranks("test_a_rank_that_never_comes"),
    ),
    Bug(
        "a missing word taken for a value",
        HEADER,
        "missing >> source & 1 ? kNotThere : u32(words[source][i][j])",
        "u32(words[source][i][j])",
        _ranks("test_a_rank_that_never_comes"),
    ),
    Bug(
        "more blocks than are resident",
        "collectives/launches.py",
        " if rows * parts <= group.blocks]",
        "]",
        _ranks("test_blocks_of_a_row"),
    ),
    Bug(
        "a norm of the updated residual",
        "collectives/one_shot.py",
        "before = None if residual is None else residual.clone()",
        "before = residual",
        _ranks("test_another_sums_up_what_no_kernel_takes"),
    ),
    Bug(
        "an all-reduce with another reader fused",
        GRAPH,
        "is_func(before, ALL_REDUCE) and len(before.users) == 1",
        "is_func(before, ALL_REDUCE)",
        _engine("test_what_stays_vllms"),
    ),
    Bug(
        "all-reduces that the compile cache does not know",
        GRAPH,
        "            all_reduce_norm.state(),\n",
        "",
        _engine("test_what_a_compiled_graph_depends_on"),
    ),
    Bug(
        "AITER's fused kernel replaced where it wins at some size",
        GRAPH,
        "self.summed(producer, op, given, is_all_reduced)",
        "self.summed(producer, op, given)",
        _engine("test_beside_aiters_fused_kernel"),
    ),
    Bug(
        "one launch for rows that it was not measured with",
        REDUCED,
        "return choice is not None and choice.plugin_serves(tokens)",
        "return choice is not None and any(choice.plugin_by_tokens)",
        _engine("test_one_op_in_the_place_of_three"),
    ),
    Bug(
        "Gemma's residual updated in place",
        REDUCED,
        "residual = residual.clone() if one_plus else residual",
        "residual = residual",
        _engine("test_functions_of_models_that_are_not_compiled"),
    ),
    Bug(
        "an all-reduce of other columns",
        REDUCED,
        "input_.dim() == 2 and input_.shape[1] == call.hidden and",
        "input_.dim() == 2 and",
        _engine("test_an_all_reduce_alone"),
    ),
    Bug(
        "the time of the fastest rank",
        MEASURED,
        "Measured(*map(max, zip(*of_ranks))",
        "Measured(*map(min, zip(*of_ranks))",
        _engine("test_ranks_measure_together_and_agree"),
    ),
    Bug(
        "ranks with other bits",
        MEASURED,
        "if not wrong and len({bits for _, bits, *_ in judged}) > 1:",
        "if False:",
        _engine("test_a_rank_with_other_bits"),
    ),
    Bug(
        "a rank's own settings",
        MEASURED,
        "reasons = [why for why in agree(lambda: lacks(config, group, clock)) if why]",
        "reasons = [why for why in agree(lambda: lacks(config, group, clock))[:1] if why]",
        _engine("test_a_rank_that_fails"),
    ),
    Bug(
        "a failed step whose results are given away",
        MEASURED,
        "            output = later()\n            check()\n",
        "            output = later()\n",
        _engine("test_a_step_whose_rank_was_missing_fails"),
    ),
    Bug(
        "a process that ends at each start",
        MEASURED,
        "            watchdog.take_marker(running, record, lambda: keep([]))\n",
        "            pass\n",
        _engine("test_a_process_that_ended_there"),
    ),
)
