"""Run the command `vllm-rocm-ops`, also as `python -m vllm_rocm_ops`: see cli.py, which needs torch."""

import importlib.util
import sys


def main() -> int:
    """Run the command line, or report that torch is missing."""
    if importlib.util.find_spec("torch") is None:
        print(
            f"vllm-rocm-ops needs torch, and {sys.executable} has none: install the build for your GPU", file=sys.stderr
        )
        return 2
    from vllm_rocm_ops.tools import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
