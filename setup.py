"""Build the code objects from csrc/ops and the extension vllm_rocm_ops._C from csrc/runtime.

Neither needs ROCm, CUDA, a GPU or torch. Without a system C++ compiler, ziglang's builds the extension.
"""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc"))
import build


class BuildCodeObjects(build_py):
    """Add the code objects to the package: into the wheel, or in place for an editable install."""

    def run(self) -> None:
        super().run()
        output = build.CODE if self.editable_mode else Path(self.build_lib, "vllm_rocm_ops", "code")
        try:
            self.code_objects = build.build(output=output.absolute())
        except build.BuildError as error:
            raise SystemExit(str(error)) from None  # setuptools would format braces in the text
        self.release = []
        if (build.CODE / build.RELEASE).is_file() and not self.editable_mode:
            self.release.append(shutil.copyfile(build.CODE / build.RELEASE, output / build.RELEASE))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        stamped = [str(file) for path in self.code_objects for file in (path, path.with_suffix(".json"))]
        return super().get_outputs(include_bytecode) + stamped + [str(path) for path in self.release]


class BuildExtension(build_ext):
    """Build with ziglang's compiler if there is no other, or if the wheel's tag names a glibc to target."""

    def run(self) -> None:
        tag = self.get_finalized_command("bdist_wheel").plat_name or ""
        glibc = re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", tag)
        if "CXX" not in os.environ and (glibc or not shutil.which("c++")):
            target = ["-target", f"{glibc[3]}-linux-gnu.{glibc[1]}.{glibc[2]}"] if glibc else []
            compiler = shlex.join([*build.zig(), "c++", *target])
            os.environ |= {
                "CC": compiler,
                "CXX": compiler,
                "LDSHARED": f"{compiler} -shared",
                "LDCXXSHARED": f"{compiler} -shared",
            }
        super().run()


def urls() -> dict[str, str]:
    """Return the package page's links: to the repository whose workflow builds it, none elsewhere."""
    if "GITHUB_REPOSITORY" not in os.environ:
        return {}
    repository = f"{os.environ['GITHUB_SERVER_URL']}/{os.environ['GITHUB_REPOSITORY']}"
    docs = f"{repository}/blob/HEAD/vllm_rocm_ops/docs"
    return {
        "Source": repository,
        "Documentation": f"{docs}/README.md",
        "Changelog": f"{docs}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


setup(
    project_urls=urls(),
    cmdclass={"build_py": BuildCodeObjects, "build_ext": BuildExtension},
    ext_modules=[
        Pybind11Extension(
            "vllm_rocm_ops._C",
            sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/runtime/*.cpp")),
            depends=sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/runtime/*.h")),
            cxx_std=20,
            extra_compile_args=["-O3", "-Wall", "-Wextra"],
            extra_link_args=["-s"],
        )
    ],
)
