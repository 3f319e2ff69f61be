"""Build of the one native part: a plain shared library, loaded with ctypes.

It includes neither Python.h nor ggml's headers, so it builds with nothing but a C compiler; what it
assumes about ggml is checked against the loaded library at start (docs/seam.md).
"""

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildSharedLibrary(build_ext):
    """Names the library without an interpreter tag: it knows no Python."""

    def get_ext_filename(self, fullname: str) -> str:  # noqa: D102 (setuptools' hook)
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:  # noqa: D102 (setuptools' hook)
        return list(ext.export_symbols)  # no PyInit_ symbol is expected


setup(
    ext_modules=[
        Extension(
            "bmoe.pipeline._hook",
            sources=[
                f"pipeline/native/{name}.c"
                for name in ("hook", "residency", "kernel", "routing", "node_trace", "predict", "dense")
            ],
            depends=["pipeline/native/hook.h", "pipeline/native/ggml_abi.h"],
            extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra"],
            libraries=["dl", "pthread", "m"],
        )
    ],
    cmdclass={"build_ext": BuildSharedLibrary},
)
