"""Lets an unmodified ``sglang`` wheel serve on a CPU: stands on ``PYTHONPATH`` of its interpreter only.

SGLang imports ``torchvision`` and ``sgl_kernel`` (a CUDA wheel) at its start, and never calls them when it serves text
on a CPU. Where they are not installed, empty modules take their place; to call anything in them raises. What its host
tier needs besides is in ``cpu_hicache``.
"""

import importlib.abc
import importlib.machinery
import sys
import types

import cpu_hicache  # noqa: F401

ABSENT = {"torchvision", "sgl_kernel"}


class Placeholder:
    """Can be imported, named, and derived from."""

    def __init__(self, path):
        self.path = path

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self.path}.{name}")

    def __mro_entries__(self, bases):
        return ()

    def __call__(self, *arguments, **named):
        raise RuntimeError(f"{self.path} is not installed here")


class EmptyModule(types.ModuleType):
    """A package of placeholders."""

    __version__ = "0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self.__name__}.{name}")


class LastResort(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what nothing else found; what is installed is found before."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return EmptyModule(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(LastResort())
