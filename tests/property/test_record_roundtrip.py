"""Any record comes back from the trace store equal, field by field."""

from __future__ import annotations

from pathlib import Path

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from tracing.record import RequestRecord
from tracing.store import TraceStore, TraceStoreOptions
from tracing.store_schema import decode_record, encode_record

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_INT = st.integers(-(2**50), 2**50)
for kind, strategy in ((int, _INT), (str, _TEXT)):
    st.register_type_strategy(kind, strategy)
RECORDS = st.builds(RequestRecord)


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(RECORDS)
def test_json_is_lossless_both_ways(record: RequestRecord) -> None:
    body = encode_record(record)
    assert decode_record(body) == record
    assert encode_record(decode_record(body)) == body


@settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
@given(st.lists(RECORDS, max_size=12))
def test_the_store_gives_back_what_it_was_given_and_its_sums(tmp_path: Path, records: list[RequestRecord]) -> None:
    path = tmp_path / "t.sqlite3"
    store = TraceStore(path, TraceStoreOptions(max_age_ns=None))
    for record in records:
        store.append(record)
    assert store.flush(30)
    stored = {record.request_id: record for record in reversed(records)}
    assert {request_id: store.record(request_id) for request_id in stored} == stored
    for money in store.totals().money:
        charges = [record.charge for record in stored.values() if record.charge.currency == money.currency]
        assert money.cost_nano == sum(charge.amount_nano or 0 for charge in charges)
        assert money.saved_nano == sum(charge.saved_nano or 0 for charge in charges)
    store.check()
    store.close()
    path.unlink()


@settings(deadline=None, max_examples=50, suppress_health_check=list(HealthCheck))
@given(RECORDS)
def test_a_record_of_an_older_build_still_reads(record: RequestRecord) -> None:
    old = msgspec.json.decode(encode_record(record))
    fields = structs.fields(RequestRecord)
    for field in fields:
        if not field.required:
            del old[field.name]
    old["a_field_of_the_future"] = 1
    read = decode_record(msgspec.json.encode(old))
    for field in fields:
        if field.required:
            assert getattr(read, field.name) == getattr(record, field.name)
