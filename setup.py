"""Compiles src/flipgrad/csrc into the shared library flipgrad/_native.so, which flipgrad.native loads with ctypes.

Everything else about the package is in pyproject.toml. Without a C++ compiler the package installs and works all the same.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/flipgrad/csrc")


class BuildLibrary(build_ext):
    """Builds a plain shared library: no Python in it, and so one name for every Python version."""

    def get_ext_filename(self, fullname: str) -> str:
        """The file of an extension: its name and nothing of the interpreter's."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and every Python: the library in it knows none."""

    def get_tag(self) -> tuple[str, str, str]:
        """The wheel's tag, py3-none-PLATFORM."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "flipgrad._native",
            sources=sorted(str(path) for path in SOURCES.glob("*.cpp")),
            depends=sorted(str(path) for path in SOURCES.iterdir() if path.suffix in (".h", ".inc")),
            language="c++",
            # Neither -ffast-math nor -march: results must be precise, and the code picks instructions when it runs.
            extra_compile_args=["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-pthread"],
            # Where dlsym is not in the C library, it is in libdl.
            extra_link_args=["-pthread", "-ldl"],
            # A failure is reported, and flipgrad.native.library.reason() says that the library is missing.
            optional=True,
        )
    ],
    cmdclass={"bdist_wheel": PlatformWheel, "build_ext": BuildLibrary},
)
