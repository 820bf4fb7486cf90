"""Count the Python frames of the package that a call enters."""

import collections
import os
import pathlib
import sys
from collections.abc import Callable

import vllm_rocm_ops

PACKAGE = str(pathlib.Path(vllm_rocm_ops.__file__).parent)


def entered(call: Callable[[], object]) -> collections.Counter[str]:
    """Return the package's functions that a call enters, with counts."""
    found = collections.Counter()

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            file = os.path.relpath(frame.f_code.co_filename, PACKAGE).removesuffix(".py")
            found[f"{file}.{frame.f_code.co_qualname}"] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found
