"""The source files of the repository."""

import fnmatch
import os
import pathlib

ROOT = pathlib.Path(__file__).parents[1]


def source_files(root: pathlib.Path) -> list[pathlib.Path]:
    """Return all files that .gitignore leaves, found without git, as a downloaded archive may lack it."""
    patterns = (root / ".gitignore").read_text().split()

    def ignored(path: pathlib.Path) -> bool:
        place = "/" + path.relative_to(root).as_posix()
        return path.name == ".git" or any(
            fnmatch.fnmatchcase(place if pattern.startswith("/") else path.name, pattern.rstrip("/"))
            for pattern in patterns
            if path.is_dir() or not pattern.endswith("/")
        )

    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not ignored(pathlib.Path(folder, name))]
        found += [path for name in names if not ignored(path := pathlib.Path(folder, name))]
    return sorted(found)


FILES = source_files(ROOT)


def file_of_tests(the_op) -> pathlib.Path:
    """Return the test file of an op, which has the name of the op's file in vllm_rocm_ops/ops."""
    *folders, name = the_op.reference.__module__.split(".")[1:]
    return ROOT.joinpath("tests", *folders, f"test_{name}.py")
