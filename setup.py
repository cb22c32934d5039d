"""What ``pyproject.toml`` cannot say yet without a warning: the loops that are worth compiling.

Each stands beside the same loop in Python, which runs wherever there was no C compiler at installation.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "kvstore._chain", ["kvstore/_chain.c"], depends=["kvstore/_xxh3.h"], py_limited_api=True, optional=True
        ),
        Extension(
            "kvstore._pages", ["kvstore/_pages.c"], depends=["kvstore/_xxh3.h"], py_limited_api=True, optional=True
        ),
        Extension("engine_adapter._unpack", ["engine_adapter/_unpack.c"], py_limited_api=True, optional=True),
        Extension("engine_adapter._words", ["engine_adapter/_words.c"], py_limited_api=True, optional=True),
        Extension("radix_index._kernels", ["radix_index/_kernels.c"], py_limited_api=True, optional=True),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
