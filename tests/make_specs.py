"""The shipped specs: specs/<model>.yaml of every row of cases/geometries.yaml, as `specgen init` writes it.

    python tests/make_specs.py      # rewrites specs/; then review the difference

A file is what `import_config` writes for the row's keys and PUBLISHED's, but for its head (which names no file
of this machine) and the lines of CHOSEN, which say so. tests/test_specs.py compares.
"""

import json
import re
import tempfile
from pathlib import Path

from ruamel.yaml import YAML

from specgen.data_files import SPECS
from specgen.hf import import_config

ROWS = YAML(typ="safe", pure=True).load(Path(__file__).parent / "cases" / "geometries.yaml")
# Rows that init refuses, with tests in test_hf.py.
REFUSED = ("deepseek-v3", "phi-3-small-8k")

_BLOCK = {"attention": {"n_heads_in_group": 8, "no_op": False, "replace_with_linear": False}}
# Keys of the published config.json that the row leaves out; with its name, they are all that count.
PUBLISHED: dict[str, dict] = {
    "llama-3.1-8b": {"_name_or_path": "meta-llama/Llama-3.1-8B", "torch_dtype": "bfloat16"},
    "mistral-7b-v0.1": {
        "_name_or_path": "mistralai/Mistral-7B-v0.1",
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 32768,
    },
    "qwen2-0.5b": {
        "_name_or_path": "Qwen/Qwen2-0.5B-Instruct",
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 32768,
    },
    "gemma-2-27b": {
        "_name_or_path": "google/gemma-2-27b-it",
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 8192,
    },
    "smollm2-135m": {
        "_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 8192,
    },
    "gpt-oss-20b": {
        "_name_or_path": "openai/gpt-oss-20b",
        "num_hidden_layers": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
    },
    # The row stands for the whole list: attention where there is some has groups of 8.
    "nemotron-super-49b": {"model_type": "nemotron-nas", "block_configs": [_BLOCK]},
    "minilm-l6": {
        "_name_or_path": "sentence-transformers/all-MiniLM-L6-v2",
        "max_position_embeddings": 512,
    },
    "whisper-small": {
        "encoder_layers": 12,
        "decoder_layers": 12,
        "decoder_attention_heads": 12,
        "max_source_positions": 1500,
        "max_target_positions": 448,
    },
    "vit-huge": {"image_size": 224, "patch_size": 14},
}
# Lines that are decided here, not by init: model -> {what the line begins with: (value, why)}.
CHOSEN: dict[str, dict[str, tuple[str, str]]] = {
    "llama-3.1-8b": {"targets:": ("[h200, a100_sxm, mi300x]", "the example of the README")},
    "llama-3.1-405b": {
        "tensor_parallel:": ("[8, 16]", "no GPU holds it; 16 replicates the 8 key/value heads")
    },
    "nemotron-super-49b": {"    layers:": ("all", "those that have attention; block_configs says which")},
    "minilm-l6": {
        "dtype:": ("float16", "the config has none, the weights are float32; float16 serves them"),
        "kv_cache:": ("{dtype: float16, page_size: 16, layout: NHD}", "the dtype above"),
    },
}
_HEADS = {
    True: (
        "# As `specgen init` writes it from the published config.json: a comment names the key that a value came from,",
        "# `inferred` marks what the file does not say.",
    ),
    False: (
        "# As `specgen init` writes it from those keys of its config.json that tests/make_specs.py reads: a comment names",
        "# the key that a value came from, `inferred` marks what they do not say.",
    ),
}


def spec_name(model: str) -> str:
    """The name of a row's spec and file: dots and dashes become underscores."""
    return re.sub("[.-]", "_", model)


def init_text(row: dict) -> str:
    """What `specgen init` writes for a row; SpecError where it refuses it."""
    config = row["config"] | PUBLISHED.get(row["model"], {})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{row['model']}.json"
        path.write_text(json.dumps({row["nested"]: config} if "nested" in row else config))
        return import_config(path, name=spec_name(row["model"]), dtype=row.get("dtype"))


def spec_text(row: dict) -> str:
    """The content of the row's file: init's text with the head and the chosen lines replaced, without the digest."""
    whole = "_name_or_path" in PUBLISHED.get(row["model"], {})
    lines = []
    for line in init_text(row).splitlines():
        if line.startswith("# Written by"):
            line = _HEADS[whole][0]
        elif line.startswith("# `inferred`"):
            line = _HEADS[whole][1]
        elif line.startswith("  sha256:"):
            continue
        for start, (value, why) in CHOSEN.get(row["model"], {}).items():
            if line.startswith(start):
                line = f"{f'{start} {value}':<34}  # chosen: {why}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Rewrite every file; remove nothing."""
    for row in ROWS:
        if row["model"] not in REFUSED:
            (SPECS / f"{spec_name(row['model'])}.yaml").write_text(spec_text(row), encoding="utf-8")


if __name__ == "__main__":
    main()
