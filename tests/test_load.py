"""Specs: what is accepted, and that every mistake is one line with its place, all of them in one run."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.errors import SpecError
from specgen.load import load, loads
from specgen.spec import AttentionSpec, HeadDim, Spec, json_schema

SPECS = sorted((Path(__file__).parent.parent / "specs").glob("*.yaml"))

GOOD = """\
version: 1
name: tiny
dtype: bfloat16
attention:
  - name: global
    layers: all
    query_heads: 32
    kv_heads: 8
    head_dim: 128
    scale: null
    sliding_window: null
    chunk: null
    softcap: null
kv_cache: {dtype: bfloat16, page_size: 16, layout: NHD}
tensor_parallel: [1]
targets: [h200]
limits: {max_seqs: 256, max_seq_len: 131072, max_tokens: 16384, max_spec_tokens: 8}
"""


def changed(*edits: tuple[str, str]) -> str:
    text = GOOD
    for old, new in edits:
        assert text.count(old) >= 1
        text = text.replace(old, new, 1)
    return text


def mistakes(text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        loads(text, "x.yaml")
    lines = str(caught.value).split("\n")
    assert len(lines) == len(caught.value.diagnostics)
    return lines


def one(text: str) -> str:
    lines = mistakes(text)
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_every_shipped_spec_loads(path):
    loaded = load(path)
    assert loaded.spec.name == path.stem
    assert loaded.text == path.read_text()


def test_the_shipped_specs_are_those_of_the_readme():
    names = "gemma_2_27b gpt_oss_20b llama_3_1_8b minilm_l6 mistral_7b_v0_1 qwen2_0_5b smollm2_135m".split()
    assert set(names) <= {path.stem for path in SPECS}


def test_a_good_spec_and_its_positions():
    loaded = loads(GOOD)
    entry = loaded.spec.attention[0]
    assert entry.head_dim == HeadDim(qk=128, v=128)
    assert entry.mask == "causal" and entry.scale is None and entry.resolved_scale == 128**-0.5
    assert loaded.spec.attention[0].rotary is None and not loaded.spec.batch_invariant
    assert loaded.positions["attention.0.kv_heads"] == (8, 5)
    assert loaded.positions["targets.0"] == (16, 11)
    assert loaded.positions["limits.max_tokens"] == (17, 46)


def test_all_mistakes_in_one_run_with_positions_and_hints():
    text = changed(
        ("kv_heads: 8", "kv_head: 8"),
        ("[h200]", "[h20]"),
        ("tensor_parallel: [1]", "tensor_parallel: [1, 0]"),
    )
    assert mistakes(text) == [
        "x.yaml:8:5: attention.0.kv_head: unknown field; did you mean 'kv_heads'?",
        "x.yaml:15:22: tensor_parallel.1: needs at least 1, got 0",
        "x.yaml:16:11: targets.0: unknown target 'h20'; did you mean 'h200'?",
    ]


def test_rules_between_fields_are_reported_beside_broken_fields():
    text = changed(
        ("softcap: null", "softcap: 0"), ("tensor_parallel: [1]", "tensor_parallel: [3]"), ("[h200]", "[x]")
    )
    lines = mistakes(text)
    assert [line.split(":")[1] for line in lines] == ["13", "15", "16"]
    assert "3 does not divide query_heads (32)" in lines[1]


@pytest.mark.parametrize(
    "old, new, line",
    [
        ("version: 1", "version: 2", "1:10: version: needs 1, got 2; this release reads version 1 only"),
        ("version: 1", "version: true", "1:10: version: needs an integer, got true"),
        ("version: 1\n", "", "1:1: version: missing field"),
        (
            "name: tiny",
            "name: Tiny",
            "2:7: name: needs lower case letters, digits and single underscores",
        ),
        ("name: tiny", "name: class", "2:7: name: 'class' is a Python keyword; needs another name"),
        ("name: tiny", f"name: {'a' * 49}", "2:7: name: needs at most 48 characters, got 49"),
        ("name: tiny", 'name: "a\\n__import__(1)"', "2:7: name: needs lower case letters"),
        ("name: global", "name: 'a; b'", "5:11: attention.0.name: needs lower case letters"),
        ("dtype: bfloat16", "dtype: bf16", "3:8: dtype: needs bfloat16, float16 or float32, got 'bf16'"),
        ("scale: null", "scale: .nan", "10:12: attention.0.scale: needs a finite number or null, got nan"),
        ("scale: null", "scale: -.inf", "10:12: attention.0.scale: needs"),
        ("scale: null", "scale: 1e999", "10:12: attention.0.scale: needs a finite number or null, got inf"),
        (
            "scale: null",
            "scale: 0",
            "10:12: attention.0.scale: needs more than 0, got 0; write null to switch it off",
        ),
        (
            "sliding_window: null",
            "sliding_window: -1",
            "11:21: attention.0.sliding_window: needs at least 1, got -1; write null to switch it off",
        ),
        (
            "sliding_window: null",
            "sliding_window: 0",
            "11:21: attention.0.sliding_window: needs at least 1, got 0; write null to switch it off",
        ),
        (
            "sliding_window: null",
            'sliding_window: "none"',
            "11:21: attention.0.sliding_window: needs an integer or null, got 'none'; write null",
        ),
        (
            "sliding_window: null",
            "slidng_window: 5",
            "11:5: attention.0.slidng_window: unknown field; did you mean 'sliding_window'?",
        ),
        ("softcap: null", "softcap: -2.0", "13:14: attention.0.softcap: needs more than 0, got -2.0"),
        (
            "softcap: null",
            "softcap: .inf",
            "13:14: attention.0.softcap: needs a finite number or null, got inf",
        ),
        ("query_heads: 32", "query_heads: '32'", "7:18: attention.0.query_heads: needs an integer, got '32'"),
        ("query_heads: 32", "query_heads: 32.0", "7:18: attention.0.query_heads: needs an integer, got 32.0"),
        (
            "query_heads: 32",
            "num_attention_heads: 32",
            "7:5: attention.0.num_attention_heads: unknown field; did you mean 'query_heads'?",
        ),
        (
            "kv_heads: 8",
            "kv_heads: 5",
            "8:15: attention.0.kv_heads: needs a divisor of query_heads (32), got 5",
        ),
        (
            "kv_heads: 8",
            "kv_heads: 8\n    kv_heads: 4",
            "9:5: attention.0.kv_heads: duplicate key; it is given first at 8:5; keep one of the two",
        ),
        (
            "head_dim: 128",
            "head_dim: 18",
            "9:15: attention.0.head_dim: needs a multiple of 4 from 16 to 512, got 18",
        ),
        (
            "head_dim: 128",
            "head_dim: {qk: 192, v: 8}",
            "9:28: attention.0.head_dim.v: needs at least 16, got 8",
        ),
        ("head_dim: 128", "head_dim: {qk: 192}", "9:15: attention.0.head_dim.v: missing field"),
        (
            "layers: all",
            "layers: some",
            "6:13: attention.0.layers: needs all, a list of indices or a slice such as 0::6, got 'some'",
        ),
        ("layers: all", "layers: '0::0'", "6:13: attention.0.layers: needs all"),
        ("layers: all", "layers: '4:2'", "6:13: attention.0.layers: the slice '4:2' selects no layer"),
        ("layers: all", "layers: [0, 0]", "6:13: attention.0.layers: layer 0 is listed twice"),
        ("layers: all", "layers: [-1]", "6:13: attention.0.layers: needs indices from 0 to 1023, got -1"),
        ("page_size: 16", "page_size: 2049", "14:40: kv_cache.page_size: needs at most 2048, got 2049"),
        (
            "page_size: 16",
            "block_size: 16",
            "14:29: kv_cache.block_size: unknown field; did you mean 'page_size'?",
        ),
        (
            "max_spec_tokens: 8",
            "max_spec_tokens: 65",
            "17:82: limits.max_spec_tokens: needs at most 64, got 65",
        ),
        (
            "max_tokens: 16384",
            "max_tokens: 4",
            "17:78: limits.max_spec_tokens: needs at most max_tokens (4), got 8",
        ),
        (
            "[h200]",
            "[a100]",
            "16:11: targets.0: unknown target 'a100'; did you mean 'a100_pcie' or 'a100_sxm'?",
        ),
        ("[h200]", "[H200]", "16:11: targets.0: unknown target 'H200'; did you mean 'h200'?"),
        ("[h200]", "[h200, h200]", "16:17: targets.1: 'h200' is listed twice"),
        ("[h200]", "[]", "16:10: targets: needs at least 1 item"),
        ("[h200]", "h200", "16:10: targets: needs a list, got 'h200'"),
        ("tensor_parallel: [1]", "tensor_parallel: [1, 1]", "15:22: tensor_parallel.1: 1 is listed twice"),
        (
            "tensor_parallel: [1]",
            "page_size: 8",
            "15:1: page_size: unknown field; it is a field of 'kv_cache'",
        ),
    ],
)
def test_one_mistake_is_one_line(old, new, line):
    assert one(changed((old, new))).startswith(f"x.yaml:{line}")


def test_chunk_excludes_a_window():
    line = one(changed(("sliding_window: null", "sliding_window: 8"), ("chunk: null", "chunk: 8")))
    assert line.startswith("x.yaml:12:12: attention.0.chunk: excludes sliding_window")


def test_yaml_1_2_scalars():
    spec = loads(changed(("scale: null", "scale: 1e-4"), ("sliding_window: null", "sliding_window: ~"))).spec
    assert spec.attention[0].scale == 1e-4 and spec.attention[0].sliding_window is None
    assert loads(changed(("softcap: null", "softcap: 50"))).spec.attention[0].softcap == 50.0
    assert loads("%YAML 1.1\n---\n" + GOOD).spec == loads(GOOD).spec


SECOND = "  - {name: local, layers: %s, query_heads: 32, kv_heads: 8, head_dim: 128, cross: %s}\nkv_cache"


@pytest.mark.parametrize(
    "first, second, cross, clash",
    [
        ("'0::2'", "'1::2'", "false", None),
        ("'0::2'", "'0::3'", "false", 0),
        ("'5::6'", "[0, 11]", "false", 11),
        ("all", "[7]", "false", 7),
        ("all", "all", "true", None),
        ("'0:4'", "'4:'", "false", None),
    ],
)
def test_layer_classes_do_not_overlap(first, second, cross, clash):
    text = changed(("layers: all", f"layers: {first}"), ("kv_cache", SECOND % (second, cross)))
    if clash is None:
        assert len(loads(text).spec.attention) == 2
    else:
        assert f"attention.1.layers: layer {clash} belongs to attention 'global' too" in one(text)


def test_layer_class_names_differ():
    text = changed(
        ("layers: all", "layers: [0]"), ("kv_cache", SECOND.replace("local", "global") % ("[1]", "false"))
    )
    assert "attention.1.name: 'global' names an earlier entry too" in one(text)


@pytest.mark.parametrize(
    "heads, degree, right",
    [
        ((32, 8), 1, (32, 8)),
        ((32, 8), 4, (8, 2)),
        ((128, 8), 8, (16, 1)),
        ((128, 8), 16, (8, 1)),
        ((71, 1), 71, (1, 1)),
        ((40, 10), 4, "4 neither divides kv_heads (10) nor is a multiple of it"),
        ((40, 10), 3, "3 does not divide query_heads (40)"),
    ],
)
def test_tensor_parallel_degrees(heads, degree, right):
    entry = AttentionSpec.model_validate(
        {"name": "a", "query_heads": heads[0], "kv_heads": heads[1], "head_dim": 64}
    )
    if isinstance(right, tuple):
        assert entry.per_rank(degree) == right
    else:
        with pytest.raises(ValueError, match="^" + right.replace("(", r"\(").replace(")", r"\)") + "$"):
            entry.per_rank(degree)
    text = changed(("query_heads: 32", f"query_heads: {heads[0]}"), ("kv_heads: 8", f"kv_heads: {heads[1]}"))
    text = text.replace("tensor_parallel: [1]", f"tensor_parallel: [{degree}]")
    if isinstance(right, str):
        assert one(text).endswith(
            f"tensor_parallel.0: degree {degree} is not legal for attention 'global': {right}"
        )


@pytest.mark.parametrize(
    "text, line",
    [
        ("", "x.yaml:1:1: needs a mapping of fields; the file is empty"),
        ("# only a comment\n", "x.yaml:1:1: needs a mapping of fields; the file is empty"),
        ("- 1\n", "x.yaml:1:1: needs a mapping of fields; got a list"),
        ("text", "x.yaml:1:1: needs a mapping of fields; got 'text'"),
        ("a:\n\t- 1\n", "x.yaml:2:1: not valid YAML: found character '\\t' that cannot start any token"),
        ("a: [1\n", "x.yaml:2:1: not valid YAML: expected ',' or ']'"),
        ("a: b: c\n", "x.yaml:1:5: not valid YAML: mapping values are not allowed here"),
        ("a: \x07\n", "x.yaml:1:4: not valid YAML: character"),
        ("a: &x [1]\nb: [*x, *x]\n", "x.yaml:1:4: a: anchors and aliases are not allowed"),
        ("a: *x\n", "x.yaml:1:4: a: anchors and aliases are not allowed"),
        ("a: !!python/object:os.system x\n", "x.yaml:1:4: a: the tag"),
        ("[" * 100000, "x.yaml:1:17: "),
        ("? [1]\n: 2\n", "x.yaml:1:3: a key needs to be text"),
        (GOOD + "---\n" + GOOD, "x.yaml:18:1: a second document; needs exactly one"),
    ],
)
def test_a_text_that_is_no_spec_is_one_clear_line(text, line):
    assert one(text).startswith(line)


@pytest.mark.parametrize(
    "data, message",
    [
        (b"\xff\xfea\x00", ":1:1: byte 0xff at offset 0 is not UTF-8 text; save the file as UTF-8"),
        (GOOD.encode().replace(b"tiny", b"t\xefny"), ":2:8: byte 0xef at offset 18 is not UTF-8 text"),
        (b"a: 1\n" * 300000, ": is larger than 65536 bytes"),
        (None, ": no such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path, data, message):
    path = tmp_path / "x.yaml"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(SpecError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}{message}") and "\n" not in str(caught.value)


def test_a_folder_and_a_strange_path(tmp_path):
    with pytest.raises(SpecError, match="is a folder; needs a file"):
        load(tmp_path)
    with pytest.raises(SpecError) as caught:
        load("no\nsuch\x1b[2J.yaml")
    assert str(caught.value) == "no\\nsuch\\x1b[2J.yaml: no such file"


def test_windows_line_ends_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load(path).spec == loads(GOOD).spec


def test_the_digest_is_of_the_content():
    base = loads(GOOD, "a.yaml").spec.digest
    assert base == loads("# comment\n" + GOOD, "b.yaml").spec.digest
    assert base == loads(changed(("    chunk: null\n", ""), ("[1]", "\n  - 1"))).spec.digest
    assert base == loads(changed(("head_dim: 128", "head_dim: {v: 128, qk: 128}"))).spec.digest
    assert base != loads(changed(("page_size: 16", "page_size: 32"))).spec.digest


def test_a_spec_is_frozen_and_round_trips():
    spec = loads(GOOD).spec
    with pytest.raises(ValueError):
        spec.name = "other"
    assert Spec.model_validate(spec.model_dump()) == spec


def test_json_schema_describes_every_field():
    schema = json_schema()
    json.dumps(schema)
    owners = [schema, *schema["$defs"].values()]
    for owner in owners:
        assert owner["additionalProperties"] is False
        for name, field in owner["properties"].items():
            assert field.get("description"), name
    assert "h200" in schema["properties"]["targets"]["items"]["enum"]
    assert schema["properties"]["version"]["const"] == 1


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_spec_raises_nothing_but_spec_errors(data):
    text = data.draw(st.one_of(st.text(max_size=60), st.just(GOOD)))
    cut = data.draw(st.integers(0, len(text)))
    text = (
        text[:cut]
        + data.draw(
            st.sampled_from(["", ":", "- ", "{", "]", "'", "\t", "&", "*", "!", "|", "%", "é", "0x", "\n"])
        )
        + text[cut:]
    )
    try:
        loads(text)
    except SpecError as error:
        assert str(error)


def test_the_schema_beside_the_specs_is_up_to_date():
    path = SPECS[0].parent / "spec.schema.json"
    assert (
        json.loads(path.read_text()) == json_schema()
    ), "write it anew with `specgen schema > specs/spec.schema.json`"
