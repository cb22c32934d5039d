"""Pages in half the bytes: elements of 16 or 32 bits kept as float8_e4m3fn, with one power of two for each group.

A group is up to 128 neighbouring elements (a head's, where the layout says how long one is). Its scale is the least
power of two that brings its largest element within 448. So an element comes back within 1/16 of itself, or within
2**-10 of 1/448 of twice its group's largest, whichever is more; zeros come back as zeros; and since all that is read
back can be narrowed again without loss, a page that goes up and down between tiers is rounded once.

It costs 1.5 to 2 CPU s/GB of wide pages to narrow and about 1 to widen: torch narrows, a table of pairs widens.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt
import torch

from kvstore.page import PageLayout

_LARGEST = 448.0
_LEAST_EXPONENT = -126
_WIDE = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_LONGEST_GROUP = 128


@dataclass(frozen=True, slots=True)
class NarrowForm:
    """The shape of a narrowed page: all elements, then a signed byte for each group."""

    dtype: str
    elements: int
    group: int

    @property
    def stored_bytes(self) -> int:
        """How many bytes a page takes."""
        return self.elements + self.elements // self.group


def narrow_form(layout: PageLayout, elements_are: str | None) -> NarrowForm:
    """Return how pages of a layout are narrowed; ``elements_are`` is their dtype where the layout tells only of bytes.

    Raises ``ValueError`` for elements that are not known, or are narrow already.
    """
    dtype = layout.dtype if layout.dtype in _WIDE else elements_are
    if dtype not in _WIDE:
        raise ValueError(f"pages of {layout.dtype!r} are kept in fp8 only if it is said which of {', '.join(_WIDE)}")
    elements = layout.page_bytes // _WIDE[dtype].itemsize
    group = gcd(_LONGEST_GROUP, layout.head_dim if layout.dtype == dtype else elements)
    return NarrowForm(dtype, elements, group)


class Narrower:
    """Narrows and widens one page at a time, in memory of its own."""

    def __init__(self, form: NarrowForm) -> None:
        self.form = form
        shape = (form.elements // form.group, form.group)
        self._dtype = _WIDE[form.dtype]
        self._work = torch.empty(shape, dtype=torch.float32)
        self._bits, self._magnitude = (
            (torch.int32, 2**31 - 1) if self._dtype.itemsize == 4 else (torch.int16, 2**15 - 1)
        )
        self._magnitudes = torch.empty(shape, dtype=self._bits)
        self._places = np.empty(form.elements // (2 if form.elements % 2 == 0 else 1), dtype=np.intp)
        self._table = _table(self._dtype, self._places.size < form.elements)

    def narrow(self, page: memoryview, out: memoryview) -> bool:
        """Fill ``out`` with the narrow form; ``False`` if an element is not finite, which it cannot keep."""
        wide, work = self._wide(page), self._work
        # Without their signs floats are in order as integers, and what is no number comes last.
        torch.bitwise_and(wide.view(self._bits), self._magnitude, out=self._magnitudes)
        largest = torch.amax(self._magnitudes, dim=1).view(self._dtype).float()
        if not bool(torch.isfinite(largest).all()):
            return False
        mantissa, exponent = torch.frexp(largest / _LARGEST)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp_(_LEAST_EXPONENT, 127)
        work.copy_(wide)
        work.mul_(torch.exp2(-exponent.float())[:, None])
        elements, scales = self._parts(out)
        elements.view(torch.float8_e4m3fn).view(work.shape).copy_(work)
        scales.view(torch.int8).copy_(exponent)
        return True

    def widen(self, stored: memoryview, out: memoryview) -> None:
        """Fill ``out`` with a page of the layout's elements."""
        elements, scales = self._parts(stored)
        table = self._table
        numbers = elements.numpy().view(np.uint16 if self._places.size < self.form.elements else np.uint8)
        np.copyto(self._places, numbers)
        np.take(table, self._places, out=np.frombuffer(out, dtype=table.dtype), mode="clip")
        wide = self._wide(out)
        torch.mul(wide, torch.exp2(scales.view(torch.int8).float()).to(self._dtype)[:, None], out=wide)

    def _wide(self, page: memoryview) -> torch.Tensor:
        flat = torch.from_numpy(np.frombuffer(page, dtype=np.uint8))
        return flat.view(self._dtype).view(self._work.shape)

    def _parts(self, stored: memoryview) -> tuple[torch.Tensor, torch.Tensor]:
        flat = torch.from_numpy(np.frombuffer(stored, dtype=np.uint8))
        return flat[: self.form.elements], flat[self.form.elements : self.form.stored_bytes]


def _table(dtype: torch.dtype, is_of_pairs: bool) -> npt.NDArray[np.unsignedinteger]:
    """Return what each byte, or each pair of neighbours, widens to."""
    one = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
    unsigned = np.uint32 if dtype.itemsize == 4 else np.uint16
    bits: npt.NDArray[np.unsignedinteger] = one.view(torch.uint8).numpy().view(unsigned)
    if not is_of_pairs:
        return bits
    pairs = np.arange(1 << 16)
    wider = np.uint64 if dtype.itemsize == 4 else np.uint32
    low, high = bits[pairs & 255].astype(wider), bits[pairs >> 8].astype(wider)
    both: npt.NDArray[np.unsignedinteger] = low | high << wider(8 * dtype.itemsize)
    return both
