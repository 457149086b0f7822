"""`specgen explain` and `specgen list` speak of the same kernels: those that measurements chose, and those of a build's refusals."""

import json

import pytest

from specgen import cli, pipeline, provenance
from specgen.data_files import SPECS
from specgen.errors import SpecgenError
from specgen.plan import dispatch_rows
from specgen.tuning import shipped

SPEC = SPECS / "llama_3_1_8b.yaml"


def test_every_name_that_list_prints_is_explained(tmp_path, capsys, monkeypatch):
    real, kept = provenance.expanded, {}

    def expanded(loaded, refused, measurements=()):
        """Takes seconds, and there are dozens of names."""
        key = len(measurements)
        if key not in kept:
            kept[key] = real(loaded, refused, measurements)
        return kept[key]

    measured = provenance.measured(pipeline.load_legal(SPEC))
    monkeypatch.setattr(provenance, "expanded", expanded)
    monkeypatch.setattr(provenance, "measured", lambda loaded: measured)
    assert cli.main(["list", str(SPEC), "--build-dir", str(tmp_path)]) == 0
    *lines, total = capsys.readouterr().out.splitlines()
    symbols = {line.split()[0] for line in lines}
    assert total.startswith(f"{len(symbols)} specializations") and len(kept) == 0
    for symbol in symbols:
        assert cli.main(["explain", symbol, str(SPEC), "--build-dir", str(tmp_path)]) == 0
        assert capsys.readouterr().out.startswith(f"{symbol}\n\n{SPEC}:")
    untuned, tuned = kept[0].variants.keys(), kept[len(measured[0])].variants.keys()
    assert tuned == symbols and tuned - untuned, "measurements chose kernels of their own"
    row = next(
        row for row in dispatch_rows(pipeline.load_legal(SPEC).spec, kept[len(measured[0])]).attention if row.narrowed
    )
    name, (low, high) = row.narrowed[0]
    text = provenance.explain(row.symbols[0], [SPEC], tmp_path)
    assert f"attention {row.index}: {row.arch}" in text and f", {name} {low}..{high}" in text
    stand_in = next(iter(kept[len(measured[0])].stand_ins.items()))
    assert f"stands in for   {stand_in[0]}" in provenance.explain(stand_in[1], [SPEC], tmp_path)


def test_what_a_build_refused_is_explained_as_it_is_listed(tmp_path):
    spec = SPECS / "smollm2_135m.yaml"
    loaded = pipeline.load_legal(spec)
    before = pipeline.expanded(loaded)
    refused = next(symbol for symbol, variant in before.variants.items() if variant.family == "prefill" and variant.aligned)
    arch = before.archs(refused)[0]
    folder = pipeline.package_folder(loaded.spec, tmp_path)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"over_budget": [{"symbol": refused, "arch": arch, "reason": "spills"}]}))
    after = pipeline.expanded(loaded, pipeline.built_over_budget(folder))
    new = next(iter(after.variants.keys() - before.variants.keys()))
    assert new in provenance.explain(new, [spec], tmp_path)
    with pytest.raises(SpecgenError, match="is no specialization of any spec"):
        provenance.explain(new, [spec], tmp_path / "not_built")


def test_shipped_files_of_other_geometries_are_not_read(monkeypatch):
    read = []
    monkeypatch.setattr(shipped.jsonl, "read", lambda path, geometry: read.append(path) or [])
    shape = next(iter(pipeline.expanded(pipeline.load_legal(SPECS / "gpt2.yaml")).variants.values())).geometry
    shipped.shipped.cache_clear()
    assert shipped.shipped(shape) == () and not read
    shipped.shipped.cache_clear()
