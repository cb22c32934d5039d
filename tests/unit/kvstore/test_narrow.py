"""What is lost in fp8, what is not, and what has no such form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.narrow import Narrower, narrow_form
from tests.samples.pages import LAYOUT

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def there_and_back(dtype: str, values: torch.Tensor) -> torch.Tensor:
    layout = replace(LAYOUT, dtype=dtype, page_tokens=1, layers=1, kv_heads=1)
    narrower = Narrower(narrow_form(layout, None))
    page = values.to(DTYPES[dtype]).reshape(-1)
    assert page.nbytes == layout.page_bytes
    stored, out = bytearray(narrower.form.stored_bytes), bytearray(layout.page_bytes)
    assert narrower.narrow(memoryview(page.view(torch.uint8).numpy()), memoryview(stored))
    narrower.widen(memoryview(stored), memoryview(out))
    return torch.frombuffer(out, dtype=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.lists(st.floats(-60000, 60000, width=16), min_size=64, max_size=64))
def test_an_element_loses_a_sixteenth_at_most_and_is_rounded_once(dtype: str, values: list[float]) -> None:
    right = torch.tensor(values).to(DTYPES[dtype])
    back = there_and_back(dtype, right)
    largest = right.double().view(-1, 32).abs().amax(1, keepdim=True).expand(-1, 32).reshape(-1)
    lost = (back.double() - right.double()).abs()
    floor = 2.0**-24 if dtype == "float16" else 0.0  # the least that a half can hold
    assert torch.all(lost <= torch.maximum(right.double().abs() / 16, 2 * largest / 448 / 1024) + floor)
    assert torch.equal(back[right == 0], right[right == 0])
    if dtype != "float16":
        assert torch.equal(there_and_back(dtype, back), back)


def test_what_is_large_and_what_is_small_keep_apart_by_groups() -> None:
    right = torch.cat([torch.full((32,), 1e30), torch.full((32,), 1e-30)])
    assert torch.allclose(there_and_back("float32", right), right, rtol=1 / 16)


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_no_number_has_no_narrow_form(odd: float) -> None:
    narrower = Narrower(narrow_form(replace(LAYOUT, dtype="bfloat16"), None))
    page = torch.zeros(narrower.form.elements, dtype=torch.bfloat16)
    page[7] = odd
    assert not narrower.narrow(memoryview(page.view(torch.uint8).numpy()), memoryview(bytearray(5000)))


def test_what_elements_are_is_known_or_asked_for() -> None:
    opaque = replace(LAYOUT, dtype="uint8", head_dim=256)
    assert narrow_form(opaque, "bfloat16").stored_bytes == opaque.page_bytes // 2 + opaque.page_bytes // 2 // 128
    for layout, told in ((opaque, None), (opaque, "int8"), (replace(LAYOUT, dtype="float8_e4m3fn"), None)):
        with pytest.raises(ValueError, match="fp8 only if"):
            narrow_form(layout, told)
