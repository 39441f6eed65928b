"""decode(encode(x)) = x; an older reader survives a newer writer; rubbish is an error by name."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.ids import AdapterId, ReplicaId
from shared.messages import AdapterState, AdapterStatus, ReplicaReport, Tier, Usage
from shared.wire import WireError, decode_report, decode_usage, encode_report

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
count = st.integers(0, 1 << 40)
states = st.builds(
    AdapterState,
    adapter=text.map(AdapterId),
    digest=text,
    tier=st.sampled_from(Tier),
    status=st.sampled_from(AdapterStatus),
    rank=count,
    size_bytes=count,
    pinned=st.booleans(),
    running=count,
    reason=text,
    inferred=st.booleans(),
)
reports = st.builds(
    ReplicaReport,
    replica=text.map(ReplicaId),
    boot=text,
    seq=count,
    base=text,
    slots=count,
    capacity=count,
    running=count,
    waiting=count,
    pages_total=count,
    pages_free=count,
    pages_cached=count,
    pages_adapters=count,
    max_model_len=count,
    heartbeat_s=st.floats(0, 1e6),
    draining=st.booleans(),
    adapters=st.lists(states, max_size=4).map(tuple),
)


@given(reports)
def test_a_report_survives_the_wire(report: ReplicaReport) -> None:
    line = encode_report(report)
    assert line.endswith(b"\n")
    assert b"\n" not in line[:-1]
    assert decode_report(line) == report


@given(reports)
def test_a_field_from_the_future_is_ignored(report: ReplicaReport) -> None:
    raw = orjson.loads(encode_report(report)) | {"from_the_future": [1, 2]}
    assert decode_report(orjson.dumps(raw)) == report


@given(reports, st.sampled_from(["replica", "seq", "base", "slots", "heartbeat_s"]))
def test_a_missing_field_is_an_error_that_names_it(report: ReplicaReport, field: str) -> None:
    raw = orjson.loads(encode_report(report))
    del raw[field]
    with pytest.raises(WireError, match=field):
        decode_report(orjson.dumps(raw))


@pytest.mark.parametrize("line", [b"", b"[]", b"nonsense", b'{"replica": 3}', b"\xff"])
def test_rubbish_is_a_wire_error(line: bytes) -> None:
    with pytest.raises(WireError):
        decode_report(line)


def test_usage_keeps_explicit_zeros_and_cached_tokens() -> None:
    raw = {
        "prompt_tokens": 7,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert decode_usage(raw) == Usage(prompt_tokens=7, completion_tokens=0, cached_tokens=3)
    assert decode_usage({"completion_tokens": 1}) is None
    assert decode_usage(None) is None
