"""The text of `describe()`: what is in a package, read from its manifest and table alone. Needs no GPU; reads
no tensor.
"""

from . import sizes
from .geometry import features
from .table import Table


def describe(manifest: dict, table: Table) -> str:
    """Groups, limits, targets, variants with sizes, registers and spills, versions; one fact a line."""
    lines = [
        f"{manifest['package']} {manifest['version']} (distribution {manifest['distribution']})",
        f"spec        {manifest['spec']['name']} sha256 {manifest['spec']['sha256']}",
        f"built by    specgen {manifest['specgen']}, triton {manifest['triton']}, "
        f"ptxas {manifest.get('ptxas') or 'none'}, "
        f"launcher by {manifest.get('launcher_compiler') or 'none (ctypes)'}",
        "limits      " + ", ".join(f"{name} {value}" for name, value in manifest["limits"].items()),
        *["invariant   no bit of a sequence depends on the other sequences of a call"] * manifest.get("batch_invariant", False),
        "",
        "layers",
        *_layers(manifest, table),
        "",
        "targets",
        *_targets(manifest, table),
        "",
        f"variants ({len(manifest['variants'])})",
        *_variants(manifest),
        "",
        f"rows        {len(table.attention_rows)} attention, {len(table.append_rows)} append_kv, "
        f"{len(table.merge_rows)} merge_states, {len(table.varlen_rows)} attention_varlen",
    ]
    return "\n".join(lines)


def _layers(manifest: dict, table: Table):
    for layer in manifest["layers"]:
        dims = (
            str(layer["qk_dim"])
            if layer["qk_dim"] == layer["v_dim"]
            else f"{layer['qk_dim']} (v {layer['v_dim']})"
        )
        on = "".join(f", {feature}" for feature in features(layer).split(", ") if feature)
        ranks = ", ".join(f"{query}/{kv}" for query, kv in table.heads(layer["name"]))
        yield (
            f"  {layer['name']}: layers {_layer_range(layer['layers'])}, "
            f"{layer['query_heads']}/{layer['kv_heads']} query/kv heads, head dim {dims}, {layer['dtype']}, "
            f"{layer['mask']}, scale {layer['scale']:.6g}, page size {layer['page_size']}{on}; per rank {ranks}"
        )


def _layer_range(layers: object) -> str:
    return layers if isinstance(layers, str) else ", ".join(map(str, layers))


def _targets(manifest: dict, table: Table):
    for target in manifest["targets"]:
        arch = target["arch"]
        symbols = {symbol for row in table.attention_rows if row.arch == arch for symbol in row.symbols}
        size = sizes.workspace_size(
            target["multiprocessors"], [manifest["variants"][symbol] for symbol in symbols]
        )
        binaries = [
            variant["binaries"][arch]
            for variant in manifest["variants"].values()
            if arch in variant["binaries"]
        ]
        driver = manifest.get("oldest_driver", {}).get(arch)
        yield (
            f"  {target['id']}: {arch}, {target['multiprocessors']} multiprocessors, "
            f"{len(binaries)} binaries, workspace {size.nbytes} bytes, oldest driver {driver or 'not stated'}"
        )


def _variants(manifest: dict):
    for symbol, variant in manifest["variants"].items():
        facts = [f"block_m {variant['block_m']}"] if variant.get("block_m") else []
        facts += [f"tile_n {variant['tile_n']}"] if variant.get("tile_n") else []
        facts += [f"{variant['num_warps']} warps", f"{variant['num_stages']} stages"]
        options = dict(variant.get("options", {}))
        share = options.pop("share", None)
        facts += [f"{variant['ctas_per_multiprocessor']} per multiprocessor" + (f" on {share} % of them" if share else "")]
        facts += [f"{name} {value}" for name, value in options.items()]
        facts += ["aligned" if variant.get("aligned") else "unaligned"]
        yield f"  {symbol} ({variant['family']}): {', '.join(facts)}"
        for arch, binary in variant["binaries"].items():
            yield (
                f"    {arch}: {binary['shared_bytes']} shared bytes, {binary['registers']} registers, "
                f"{binary['spill_bytes']} spill bytes, {binary['num_threads']} threads, "
                f"sha256 {binary['sha256'][:12]}"
            )
