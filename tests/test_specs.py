"""The shipped specs: what init writes for every row of the geometries table, and each expands for both vendors."""

from pathlib import Path

import pytest
from make_specs import CHOSEN, PUBLISHED, REFUSED, ROWS, init_text, spec_name, spec_text

from specgen.data_files import SPECS
from specgen.errors import SpecError
from specgen.expand import expand
from specgen.load import load
from specgen.pipeline import load_legal
from specgen.target import load_targets

SHIPPED = [row for row in ROWS if row["model"] not in REFUSED]
SMALL = {"h200": "sm_90", "mi300x": "gfx942"}


def test_every_row_has_its_spec_or_is_refused():
    assert {path.stem for path in SPECS.glob("*.yaml")} >= {spec_name(row["model"]) for row in SHIPPED}
    for row in ROWS:
        if row["model"] in REFUSED:
            with pytest.raises(SpecError):
                init_text(row)
    assert PUBLISHED.keys() | CHOSEN.keys() <= {row["model"] for row in SHIPPED}


@pytest.mark.parametrize("row", SHIPPED, ids=lambda row: row["model"])
def test_a_spec_is_what_init_writes_but_for_chosen_lines(row):
    text = (SPECS / f"{spec_name(row['model'])}.yaml").read_text(encoding="utf-8")
    assert text == spec_text(row), "run `python tests/make_specs.py` and review the difference"
    written = [
        line for line in init_text(row).splitlines() if not line.startswith(("#", "  config:", "  sha256:"))
    ]
    lines = [line for line in text.splitlines() if not line.startswith(("#", "  config:"))]
    assert len(lines) == len(written)
    differing = [line for line, other in zip(lines, written) if line != other]
    assert all("  # chosen: " in line for line in differing)
    assert len(differing) == len(CHOSEN.get(row["model"], {}))


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_spec_expands_for_both_vendors(path):
    loaded = load_legal(path)
    assert set(SMALL) <= set(loaded.spec.targets)
    uses = expand(loaded.spec, load_targets()).uses
    assert set(SMALL.values()) <= {use.arch for use in uses}
    assert {use.layer for use in uses} == {entry.name for entry in loaded.spec.attention}
    assert loaded.spec.name == path.stem and Path(loaded.path) == path


def test_layer_classes_of_the_models_that_have_several():
    def of(name, *fields):
        return [tuple(getattr(e, f) for f in fields) for e in load(SPECS / f"{name}.yaml").spec.attention]

    assert of("gemma_2_27b", "name", "sliding_window", "softcap") == [
        ("sliding", 4096, 50.0),
        ("global", None, 50.0),
    ]
    assert of("gemma_3_27b", "name", "sliding_window", "softcap") == [
        ("sliding", 1024, None),
        ("global", None, None),
    ]
    assert of("gpt_oss_20b", "name", "sliding_window", "sinks") == [
        ("sliding", 128, True),
        ("global", None, True),
    ]
    assert of("llama_4_scout", "name", "sliding_window", "chunk") == [
        ("chunked", None, 8192),
        ("global", None, None),
    ]
    assert of("whisper_small", "name", "mask", "cross") == [
        ("encoder", "bidirectional", False),
        ("decoder", "causal", False),
        ("cross", "bidirectional", True),
    ]
    spec = load(SPECS / "llama_3_1_405b.yaml").spec
    assert [spec.attention[0].per_rank(degree) for degree in spec.tensor_parallel] == [(16, 1), (8, 1)]
