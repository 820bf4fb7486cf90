"""Explain which kernel a call runs, and why."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_rocm_ops.core.launch import Launch

EXPLAINED_CONFIGS = 8  # cheapest configurations in an explanation's text


@dataclass(frozen=True)
class Explanation:
    """The outcome of `Op.explain`.

    `launches` is empty if the reference runs. `considered` has all configurations with their costs, cheapest first, if the op has
    a cost model.
    """

    op: str
    arch: str | None
    launches: tuple[Launch, ...]
    config: object
    source: str
    rules: tuple[tuple[str, bool], ...] = ()
    considered: tuple[tuple[object, dict[str, float]], ...] = ()

    @property
    def is_fallback(self) -> bool:
        """True if the reference runs. A call that needs no launch, as with no rows, is not a fallback."""
        return self.config is None

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.arch or 'cpu'}: {self.source}"]
        lines += [f"  {'yes' if holds else 'NO '} {rule}" for rule, holds in self.rules]
        lines += [f"  {launch.symbol} grid {launch.grid} block {launch.block}" for launch in self.launches]
        if self.considered:
            lines.append(f"  of {len(self.considered)} configurations, by predicted microseconds:")
        for place, (config, terms) in enumerate(self.considered):
            if place < EXPLAINED_CONFIGS or config == self.config:
                mark, cost = "*" if config == self.config else " ", sum(terms.values())
                parts = " + ".join(f"{term} {value:.2f}" for term, value in terms.items())
                lines.append(f"  {mark} {cost:8.2f}  {config}: {parts}")
        return "\n".join(lines)
