from __future__ import annotations

import gzip
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.convert import FORMATS, Conversion, convert
from loadtests.trace import BadTrace, decode, encode

SOURCES = {
    "replay": "arrival_s,tenant_id,adapter_id,session_id,input_tokens,output_tokens\n"
    "0.0,t1,a9,s0,374,44\n2.5,t1,a9,s0,500,3\n",
    "arena": "arrival_s,adapter_id,input_tokens,output_tokens\n0.0,a9,374,44\n2.5,a9,500,3\n",
    "servegen": "arrival_s,client_id,input_tokens,output_tokens,length_source\n"
    "0.0,a9,374,44,own\n2.5,a9,500,3,borrowed\n",
    "azure": "arrival_s,input_tokens,output_tokens\n0.0,374,44\n2.5,500,3\n",
    "azure-original": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:06.4799600,500,3\n",
    "mooncake": '{"timestamp":0,"input_length":374,"output_length":44,"hash_ids":[1]}\n'
    '{"timestamp":2500,"input_length":500,"output_length":3,"hash_ids":[1]}\n',
    "ledger": '[{"at":100,"tenant":"t1","adapter":"a9","prompt_tokens":374,'
    '"completion_tokens":44},{"at":102.5,"tenant":"t1","adapter":"a9","prompt_tokens":500,'
    '"completion_tokens":3}]',
    "access-log": '{"created":100,"model":"a9","user":"t1","usage":{"prompt_tokens":374,'
    '"completion_tokens":44}}\n{"created":102.5,"model":"a9","user":"t1","usage":'
    '{"prompt_tokens":500,"completion_tokens":3}}\n',
}


def source(folder: Path, form: str) -> Path:
    path = folder / form
    path.write_text(SOURCES[form])
    return path


def test_every_format_has_a_sample_here() -> None:
    assert {known.name for known in FORMATS} == set(SOURCES)


@pytest.mark.parametrize("form", SOURCES)
def test_a_source_is_recognised_and_its_times_and_lengths_are_kept(
    form: str, tmp_path: Path
) -> None:
    rows = convert(source(tmp_path, form), Conversion())
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [(374, 44), (500, 3)]
    spread = 3.0 if form == "mooncake" else 1e-6
    assert rows[0].at_s == 0
    assert rows[1].at_s == pytest.approx(2.5, abs=spread)
    assert decode(encode(rows)) == rows
    assert rows == convert(source(tmp_path, form), Conversion(), form=form)


@pytest.mark.parametrize("form", ["replay", "arena", "servegen", "ledger", "access-log"])
def test_names_that_the_source_has_are_kept(form: str, tmp_path: Path) -> None:
    rows = convert(source(tmp_path, form), Conversion())
    assert {row.adapter for row in rows} == {"a9"}
    tenant = {"replay": "t1", "ledger": "t1", "access-log": "t1", "servegen": "a9"}.get(form)
    assert tenant is None or {row.tenant for row in rows} == {tenant}


def test_a_session_keeps_the_adapter_that_was_drawn_for_it(tmp_path: Path) -> None:
    path = tmp_path / "sessions"
    lines = [f"{i},t1,,s{i % 7},10,10" for i in range(200)]
    path.write_text("\n".join([SOURCES["replay"].splitlines()[0], *lines]))
    rows = convert(path, Conversion(adapters=50))
    assert len({(row.session, row.adapter) for row in rows}) == 7


def test_a_gzipped_file_reads_as_the_plain_one(tmp_path: Path) -> None:
    packed = tmp_path / "azure.csv.gz"
    packed.write_bytes(gzip.compress(SOURCES["azure"].encode()))
    assert convert(packed, Conversion()) == convert(source(tmp_path, "azure"), Conversion())


def test_the_base_is_named_as_the_base(tmp_path: Path) -> None:
    rows = convert(source(tmp_path, "arena"), Conversion(base="a9"))
    assert {row.adapter for row in rows} == {None}


def test_scales_and_slices_apply_to_the_source(tmp_path: Path) -> None:
    how = Conversion(speed=5, prompt_scale=0.1, output_scale=2, tokens_max=80)
    rows = convert(source(tmp_path, "azure"), how)
    assert [(row.at_s, row.prompt_tokens, row.output_tokens) for row in rows] == [
        (0, 37, 80),
        (0.5, 50, 6),
    ]
    later = convert(source(tmp_path, "azure"), Conversion(start_s=1, duration_s=5))
    assert [row.at_s for row in later] == [1.5]


@given(st.binary(max_size=200))
def test_any_bytes_give_a_trace_or_a_reason(data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with suppress(BadTrace):
            convert(Path(file.name), Conversion())


def test_a_row_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "azure"
    path.write_text(SOURCES["azure"] + "3.0,many,3\n")
    with pytest.raises(BadTrace, match=r"azure:4: as azure: invalid literal"):
        convert(path, Conversion())
    with pytest.raises(BadTrace, match="no format splitwise"):
        convert(path, Conversion(), form="splitwise")
