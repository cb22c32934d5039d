"""The global prefix index: which instance holds which blocks in which tier. Pure and synchronous; see the README."""

from radix_index.base import IndexStats, InstanceMatch, Knowledge, PrefixIndex
from radix_index.errors import RadixIndexError, UnknownHolderError
from radix_index.index import RadixIndex
from radix_index.naive import NaiveIndex
from radix_index.resync import Resync, ResyncOptions, Step
from radix_index.source import SourceFold

__all__ = [
    "IndexStats",
    "InstanceMatch",
    "Knowledge",
    "NaiveIndex",
    "PrefixIndex",
    "RadixIndex",
    "RadixIndexError",
    "Resync",
    "ResyncOptions",
    "SourceFold",
    "Step",
    "UnknownHolderError",
]
