"""Parse and run the `vllm-rocm-ops` commands (one file each in `commands/`), and print errors as one line."""

from __future__ import annotations

import argparse
import sys
from types import ModuleType

import vllm_rocm_ops
from vllm_rocm_ops.tools.commands import (
    advise,
    bandwidth,
    bench,
    check,
    doctor,
    emulate,
    explain,
    predict,
    profile,
    sweep,
    tune,
    verify,
)

MODULES = (doctor, explain, check, advise, verify, bench, sweep, profile, bandwidth, tune, predict, emulate)
COMMANDS: dict[str, ModuleType] = {module.__name__.rpartition(".")[2]: module for module in MODULES}


def parse_arguments(argv: list[str] | None) -> dict[str, object]:
    """Return `command` and the values of its options."""
    about = "FP8 decode kernels for vLLM on AMD Instinct: diagnose, check, benchmark, tune and predict."
    parser = argparse.ArgumentParser(prog="vllm-rocm-ops", description=about)
    parser.add_argument("--version", action="version", version=vllm_rocm_ops.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        module.add(commands.add_parser(name, help=module.__doc__.partition("\n")[0], description=module.__doc__))
    return vars(parser.parse_args(argv))


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    values = parse_arguments(argv)
    command = values.pop("command")
    try:
        return COMMANDS[command].run(**values)
    except (ImportError, TypeError, ValueError, RuntimeError) as error:
        why = str(error).partition("\n")[0]  # torch's errors go on with a stack
        print(f"{command}: {why}" if isinstance(error, RuntimeError) else why, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; completed measurements are saved", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
