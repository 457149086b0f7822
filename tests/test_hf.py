"""`specgen init`: every row of the geometries table is imported with its trap right, or refused with its
reason.
"""

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from specgen.errors import SpecError
from specgen.hf import import_config
from specgen.load import loads

ROWS = YAML(typ="safe", pure=True).load(Path(__file__).parent / "cases" / "geometries.yaml")
BY_NAME = {row["model"]: row for row in ROWS}

# Rows that no spec can hold as they stand, and what the refusal says.
REFUSALS = {
    "deepseek-v3": "kv_lora_rank: multi-head latent attention",
    "phi-3-small-8k": "block-sparse attention is another algorithm",
    "nemotron-super-49b": "block_configs: needs a list with one block per layer, which gives the KV heads",
}


def imported(tmp_path, config, **arguments):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    text = import_config(path, **arguments)
    return loads(text, "init.yaml").spec


def refusal(tmp_path, config, **arguments):
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(SpecError) as caught:
        import_config(path, **arguments)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(str(path))
    return message.removeprefix(str(path))


def import_row(tmp_path, row):
    config = {row["nested"]: row["config"]} if "nested" in row else row["config"]
    folder = tmp_path / row["model"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return import_config(folder, dtype=row.get("dtype"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["model"])
def test_geometries(tmp_path, row):
    if row["model"] in REFUSALS:
        with pytest.raises(SpecError) as caught:
            import_row(tmp_path, row)
        assert REFUSALS[row["model"]] in str(caught.value) and "\n" not in str(caught.value)
        assert row.get("refuse", "") in str(caught.value)
        return
    text = import_row(tmp_path, row)
    spec = loads(text, "init.yaml").spec
    assert spec.name == re.sub("[.-]", "_", row["model"])
    assert spec.dtype == spec.kv_cache.dtype == row.get("dtype", "bfloat16")
    heads = tuple(int(part) for part in row["heads"].split("/"))
    softcap = row.get("softcap")
    masks = {entry.mask for entry in spec.attention}
    assert masks == {row.get("mask", "causal")} or row["model"] == "whisper-small"
    for entry in spec.attention:
        assert (entry.query_heads, entry.kv_heads) == heads
        assert (entry.head_dim.qk, entry.head_dim.v) == (row["dim"], row["dim"])
        assert entry.softcap == softcap
        assert entry.sinks == row.get("sinks", False)
        assert entry.alibi == row.get("alibi", False)
        assert entry.resolved_scale == pytest.approx(right_scale(row), rel=1e-12)
        assert (entry.scale is None) == ("scale" not in row)
    windows = {entry.sliding_window for entry in spec.attention}
    said = row.get("window")
    if isinstance(said, str):
        assert windows == {int(said.split()[0]), None}
    else:
        assert windows == {said}
    chunks = {entry.chunk for entry in spec.attention}
    assert chunks == ({row["chunk"], None} if "chunk" in row else {None})


def right_scale(row):
    said = str(row.get("scale", f"1/sqrt({row['dim']})"))
    if root := re.fullmatch(r"1/sqrt\((\d+)\)", said):
        return int(root[1]) ** -0.5
    return float(Fraction(said))


def classes(spec, count):
    """Layer class of every layer of a model of `count` layers, by the name of its entry; "" where there is
    none.
    """
    from specgen.fields import layer_indices

    names = [""] * count
    for entry in spec.attention:
        for index in layer_indices(entry.layers, count):
            names[index] = entry.name
    return names


def test_gemma_2_alternates_and_gemma_3_has_every_sixth_layer_global(tmp_path):
    spec = loads(import_row(tmp_path, BY_NAME["gemma-2-27b"])).spec
    assert classes(spec, 46) == ["sliding", "global"] * 23
    spec = loads(import_row(tmp_path, BY_NAME["gemma-3-27b"])).spec
    assert classes(spec, 62) == ["global" if (i + 1) % 6 == 0 else "sliding" for i in range(62)]


def test_gpt_oss_layer_types(tmp_path):
    config = BY_NAME["gpt-oss-20b"]["config"] | {
        "num_hidden_layers": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    }
    spec = imported(tmp_path, config)
    assert classes(spec, 24) == ["sliding", "global"] * 12
    assert [entry.layers for entry in spec.attention] == ["0::2", "1::2"]
    assert "contradiction: 24 layers are listed, num_hidden_layers is 25" in refusal(
        tmp_path, config | {"num_hidden_layers": 25}
    )


def test_llama_4_has_chunks_and_global_layers(tmp_path):
    config = BY_NAME["llama-4-scout"]["config"] | {"num_hidden_layers": 8}
    assert classes(imported(tmp_path, {"text_config": config, "model_type": "llama4"}), 8) == [
        "chunked"
    ] * 3 + ["global"] + ["chunked"] * 3 + ["global"]
    spec = imported(tmp_path, config | {"no_rope_layers": [0, 1] * 4})
    assert classes(spec, 8) == ["global", "chunked"] * 4
    spec = imported(tmp_path, config | {"max_position_embeddings": 4096})
    assert spec.attention[0].chunk is None and spec.attention[0].layers == "all"


BLOCK = {"n_heads_in_group": 8, "no_op": False, "replace_with_linear": False}


def test_nemotron_gives_kv_heads_per_layer_and_leaves_layers_without_attention_out(tmp_path):
    blocks = [
        BLOCK,
        BLOCK | {"no_op": True, "n_heads_in_group": None},
        BLOCK,
        BLOCK | {"replace_with_linear": True},
        BLOCK,
    ]
    config = BY_NAME["nemotron-super-49b"]["config"] | {"model_type": "nemotron-nas"}
    spec = imported(
        tmp_path, config | {"block_configs": [{"attention": block, "ffn": {}} for block in blocks]}
    )
    (entry,) = spec.attention
    assert (entry.query_heads, entry.kv_heads, entry.head_dim.qk) == (64, 8, 128)
    assert classes(spec, 5) == ["global", "", "global", "", "global"]
    blocks[2] = BLOCK | {"n_heads_in_group": 16}
    spec = imported(tmp_path, config | {"block_configs": [{"attention": block} for block in blocks]})
    assert {entry.name: entry.kv_heads for entry in spec.attention} == {"global_kv8": 8, "global_kv4": 4}
    blocks[2] = BLOCK | {"n_heads_in_group": 7}
    message = refusal(tmp_path, config | {"block_configs": [{"attention": block} for block in blocks]})
    assert message == ": block_configs.2.attention.n_heads_in_group: needs a divisor of 64 query heads, got 7"


def test_whisper_has_three_masks(tmp_path):
    config = BY_NAME["whisper-small"]["config"] | {
        "encoder_layers": 12,
        "decoder_layers": 12,
        "decoder_attention_heads": 12,
    }
    spec = imported(tmp_path, config | {"max_source_positions": 1500, "max_target_positions": 448})
    assert [(e.name, e.layers, e.mask, e.cross) for e in spec.attention] == [
        ("encoder", "0:12", "bidirectional", False),
        ("decoder", "12:", "causal", False),
        ("cross", "12:", "bidirectional", True),
    ]
    assert spec.limits.max_seq_len == 1500


LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "change, right",
    [
        ({"head_dim": None}, {"qk": 128}),
        ({"num_key_value_heads": None}, {"kv_heads": 32}),
        ({"model_type": "qwen3"}, {"qk": 128, "window": None}),
        (
            {
                "model_type": "gemma",
                "hidden_size": 3072,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
            },
            {"qk": 256},
        ),
        ({"model_type": "mistral"}, {"window": 4096}),
        ({"model_type": "mistral", "sliding_window": None}, {"window": None}),
        ({"model_type": "qwen2", "sliding_window": 1024}, {"window": None}),
        ({"model_type": "granite"}, {"scale": 1.0}),
        ({"attention_multiplier": 128**-0.5}, {"scale": None}),
        ({"sliding_window": 8192}, {"window": None}),
        ({"model_type": "bert", "is_decoder": True}, {"mask": "causal"}),
        ({"is_causal": False}, {"mask": "bidirectional"}),
        ({"model_type": "new", "architectures": ["NewForMaskedLM"]}, {"mask": "bidirectional"}),
        ({"use_bidirectional_attention": True}, {"mask": "bidirectional"}),
        (
            {"model_type": "falcon", "multi_query": False, "num_kv_heads": 8, "num_key_value_heads": None},
            {"kv_heads": 32},
        ),
        ({"model_type": "RefinedWeb", "n_head_kv": 8, "num_key_value_heads": None}, {"kv_heads": 8}),
        ({"model_type": "gpt_bigcode", "num_key_value_heads": None}, {"kv_heads": 1}),
        (
            {"model_type": "mpt", "attn_config": {"alibi": False, "kv_n_heads": 8, "softmax_scale": 0.5}},
            {"kv_heads": 8, "scale": 0.5},
        ),
        ({"v_head_dim": 64}, {"qk": 128, "v": 64}),
        ({"model_type": "gpt2", "scale_attn_weights": False}, {"scale": 1.0}),
        ({"attn_logit_softcapping": None}, {"softcap": None}),
        ({"torch_dtype": "float16"}, {"dtype": "float16"}),
        ({"dtype": "torch.float32"}, {"dtype": "float32"}),
    ],
)
def test_what_a_config_leaves_to_its_type(tmp_path, change, right):
    spec = imported(tmp_path, {k: v for k, v in (LLAMA | change).items()})
    (entry,) = spec.attention
    came = {
        "qk": entry.head_dim.qk,
        "v": entry.head_dim.v,
        "window": entry.sliding_window,
        "dtype": spec.dtype,
    }
    came |= {key: getattr(entry, key) for key in ("kv_heads", "scale", "mask", "softcap")}
    assert {key: came[key] for key in right} == right
    assert spec.limits.max_seq_len == 8192


def test_qwen_windows_begin_at_max_window_layers(tmp_path):
    change = {
        "use_sliding_window": True,
        "sliding_window": 1024,
        "max_window_layers": 3,
        "num_hidden_layers": 6,
    }
    spec = imported(tmp_path, LLAMA | {"model_type": "qwen2"} | change)
    assert classes(spec, 6) == ["global"] * 3 + ["sliding"] * 3
    assert [entry.layers for entry in spec.attention] == ["0:3", "3:"]


def test_layers_without_attention_are_left_out(tmp_path):
    spec = imported(
        tmp_path, LLAMA | {"layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2}
    )
    assert classes(spec, 6) == ["", "", "global"] * 2
    spec = imported(
        tmp_path, LLAMA | {"attn_layer_period": 4, "attn_layer_offset": 1, "num_hidden_layers": 8}
    )
    assert classes(spec, 8) == ["", "global", "", ""] * 2


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"num_key_value_heads": 5},
            ": num_key_value_heads: contradiction: 5 KV heads do not divide 32 query heads",
        ),
        (
            {"hidden_size": 4097},
            ": hidden_size: contradiction: 32 heads do not divide 4097, and head_dim is not given",
        ),
        ({"num_attention_heads": "32"}, ": num_attention_heads: needs a positive integer, got '32'"),
        ({"num_attention_heads": 0}, ": num_attention_heads: needs a positive integer, got 0"),
        (
            {"num_attention_heads": None},
            ": gives no number of attention heads; needs one of num_attention_heads",
        ),
        ({"hidden_size": None}, ": gives neither head_dim nor a hidden size"),
        (
            {"head_dim": 30},
            ": a spec cannot hold this model: attention.0.head_dim: needs a multiple of 4",
        ),
        ({"sliding_window": -1}, ": sliding_window: needs a positive integer, got -1"),
        ({"torch_dtype": "int8"}, ": torch_dtype: needs bfloat16, float16, float32, got 'int8'"),
        ({"model_type": 7}, ": model_type: needs text, got 7"),
        ({"model_type": "t5"}, ": model_type: t5: a learned relative position bias is not a spec field"),
        (
            {"model_type": "modernbert"},
            ": model_type: modernbert: a two-sided sliding window is not a spec field",
        ),
        (
            {"is_causal": False, "sliding_window": 64},
            ": sliding_window: a two-sided sliding window is not a spec field",
        ),
        (
            {"position_embedding_type": "relative_key"},
            ": position_embedding_type: 'relative_key': a learned relative",
        ),
        (
            {"layer_types": ["sparse_attention"]},
            ": layer_types: 'sparse_attention': attention of this kind is not imported",
        ),
        (
            {"layer_types": ["sliding_attention"]},
            ": sliding_window: missing, but layers are said to be sliding",
        ),
        (
            {"attention_chunk_size": 512},
            ": num_hidden_layers: missing; needed because of attention_chunk_size",
        ),
        (
            {"scale_attn_by_inverse_layer_idx": True},
            ": scale_attn_by_inverse_layer_idx: a scale that differs",
        ),
        (
            {"swa_num_key_value_heads": 2},
            ": swa_num_key_value_heads: 2: attention of this kind is not imported",
        ),
        ({"model_type": "cwm", "sliding_window": 64}, ": layer_types: missing; needed for cwm"),
        ({"attn_config": 3}, ": attn_config: needs a mapping, got 3"),
    ],
)
def test_a_config_that_cannot_be_a_spec_is_one_clear_line(tmp_path, change, message):
    assert refusal(tmp_path, LLAMA | change).startswith(message)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", ":1:1: is empty; needs a JSON value"),
        ('{"hidden_size": 4096, "num_att', ":1:23: not valid JSON: Unterminated string"),
        ('{"hidden_size": 4096,\n "n": ', ":2:7: not valid JSON: Expecting value; it ends too early"),
        ('{"a": 1,}', ":1:9: not valid JSON: "),
        ("[1, 2]", ":1:1: needs a JSON object"),
        ('{"a": 1, "a": 2}', ": a: duplicate key"),
        ("[" * 100000, ": not valid JSON: nested too deeply"),
        ("{}", ": gives no number of attention heads"),
        (
            '{"num_attention_heads": 1e999, "hidden_size": 64}',
            ": num_attention_heads: needs a positive integer, got inf",
        ),
        ('{"num_attention_heads": ' + "9" * 5000 + "}", ": not valid JSON: Exceeds the limit"),
    ],
)
def test_a_damaged_file_is_one_clear_line(tmp_path, text, message):
    assert refusal(tmp_path, text).startswith(message)


def test_files_and_folders(tmp_path):
    with pytest.raises(
        SpecError, match=r"is a folder without config\.json; needs a model folder or a config file"
    ):
        import_config(tmp_path)
    with pytest.raises(SpecError, match="no such file"):
        import_config(tmp_path / "nothing.json")
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(SpecError, match=r":1:8: byte 0xff at offset 7 is not UTF-8 text"):
        import_config(tmp_path)


def test_names(tmp_path):
    def name(folder, **config):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "config.json").write_text(json.dumps(LLAMA | config))
        return loads(import_config(tmp_path / folder)).spec

    assert name("Llama-3.1-8B").name == "llama_3_1_8b"
    assert name("01 -- strange").name == "model_01_strange"
    assert name("class").name == "class_model"
    assert name("x" * 80).name == "x" * 48
    spec = name("models--meta-llama--Llama-3.1-8B/snapshots/" + "0a" * 20)
    assert spec.name == "llama_3_1_8b" and spec.source.config == "meta-llama/Llama-3.1-8B"
    assert name("a", _name_or_path="org/Some-Model").source.config == "org/Some-Model"
    assert name("b", _name_or_path="/home/me/secret/path").source.config == "b"
    assert len(spec.source.sha256) == 64
    assert "name: needs lower case letters" in refusal(tmp_path, LLAMA, name="No Good")
    assert imported(tmp_path, LLAMA, name="chosen").name == "chosen"


@pytest.mark.parametrize(
    "hostile", ["a\nversion: 2\nx", "a: b # c", "a\u2028b", "*x", "'\"{", "1e4", "null", "\x1b[2J"]
)
def test_texts_of_a_config_cannot_write_yaml(tmp_path, hostile):
    folder = tmp_path / hostile
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | {"_name_or_path": hostile}))
    text = import_config(folder, schema=hostile)
    spec = loads(text).spec
    assert spec.version == 1 and len(spec.attention) == 1
    assert all(line.isprintable() for line in text.split("\n"))
    assert text.splitlines()[0].startswith("# yaml-language-server: $schema=")


def test_comments_say_where_each_value_is_from(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"sliding_window": 16384}))
    text = import_config(tmp_path, name="x")
    lines = {
        line.split(":")[0].strip(): line.partition("  # ")[2].strip()
        for line in text.splitlines()
        if "  # " in line
    }
    assert lines["query_heads"] == "num_attention_heads"
    assert lines["head_dim"] == "inferred: hidden_size / heads"
    assert lines["sliding_window"] == "sliding_window 16384 never binds: sequences have at most 8192"
    assert lines["dtype"] == "inferred: the config has none"
    assert lines["mask"] == "inferred: a decoder"
    assert text.splitlines()[0] == "# yaml-language-server: $schema=spec.schema.json"
    assert (
        import_config(tmp_path, schema="../s.json").splitlines()[0]
        == "# yaml-language-server: $schema=../s.json"
    )


def test_image_tokens_make_prefix_ranges(tmp_path):
    text = LLAMA | {"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 1024}
    spec = imported(tmp_path, {"model_type": "gemma3", "text_config": text})
    assert {entry.prefix_ranges for entry in spec.attention} == {True} and len(spec.attention) == 2
    assert not imported(tmp_path, text).attention[0].prefix_ranges


def test_an_encoder_may_have_alibi(tmp_path):
    (entry,) = imported(tmp_path, LLAMA | {"model_type": "bert", "position_embedding_type": "alibi"}).attention
    assert (entry.mask, entry.alibi) == ("bidirectional", True)


@pytest.mark.parametrize("value", [{"": "bfloat16"}, ["bfloat16"], 5, True])
def test_a_dtype_that_is_no_name_is_refused(tmp_path, value):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 1, "torch_dtype": value}))
    with pytest.raises(SpecError, match="config.json: torch_dtype: needs .*, got "):
        import_config(path)
