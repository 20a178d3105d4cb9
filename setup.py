"""Compiles src/flipgrad/csrc into the shared library flipgrad/_native.so, which flipgrad.native loads with ctypes.

Everything else about the package is in pyproject.toml. Without a C++ compiler the package installs and works all the same.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/flipgrad/csrc")


class BuildLibrary(build_ext):
    """Builds a plain shared library: no Python in it, and so one name for every Python version."""

    def get_ext_filename(self, fullname: str) -> str:
        """The file of an extension: its name and nothing of the interpreter's."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))


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
    cmdclass={"build_ext": BuildLibrary},
)
