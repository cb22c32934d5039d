"""Layouts: their fingerprint and their size."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from kvstore.page import KEY_BYTES, PageLayout, Tier, key_content_hash, key_fingerprint, page_key

LAYOUT = PageLayout(weights_id="w", dtype="float32", page_tokens=16, layers=30, kv_heads=3, head_dim=64)


def test_every_field_is_in_the_fingerprint() -> None:
    for field in fields(PageLayout):
        value = getattr(LAYOUT, field.name)
        other = (not value) if isinstance(value, bool) else value + (1 if isinstance(value, int) else "x")
        assert replace(LAYOUT, **{field.name: other}).fingerprint != LAYOUT.fingerprint, field.name
    assert replace(LAYOUT).fingerprint == LAYOUT.fingerprint
    assert len(LAYOUT.fingerprint) == 16


def test_a_page_is_as_long_as_its_dims_say() -> None:
    assert LAYOUT.page_bytes == 737_280
    assert replace(LAYOUT, dtype="bfloat16").page_bytes == 368_640
    assert replace(LAYOUT, is_mla=True).page_bytes == 368_640
    with pytest.raises(ValueError, match="float31"):
        _ = replace(LAYOUT, dtype="float31").page_bytes


def test_a_key_is_taken_apart_as_it_was_put_together() -> None:
    key = page_key(LAYOUT.fingerprint, b"h" * 32)
    assert (len(key), key_fingerprint(key), key_content_hash(key)) == (KEY_BYTES, LAYOUT.fingerprint, b"h" * 32)


def test_tiers_are_ordered_fastest_first() -> None:
    assert [tier.label for tier in sorted(Tier)] == ["device", "host", "disk", "pool"]
