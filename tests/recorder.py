"""An executor that keeps its launches, with what they leave unwritten, and runs nothing."""

from vllm_rocm_ops.core import archs


class Recorder:
    def __init__(self, arch: str = "gfx942"):
        self.arch, self.launches = archs.named(arch), []

    def launch(self, launch, uninitialized) -> None:
        self.launches.append((launch, uninitialized))

    @property
    def symbols(self) -> list[str]:
        return [launch.symbol for launch, _ in self.launches]
