"""A hand-made package over a device that records its launches and computes with the float64 reference;
arguments for calls.
"""

import json

import torch

from specgen.runtime import reference
from specgen.runtime.arguments import variant_call_arguments
from specgen.runtime.errors import CaptureError
from specgen.runtime.package import Package
from specgen.runtime.table import AppendRow, AttentionRow, MergeRow, VarlenRow

ARCH, PAGE, QK, V, SPEC = "sm_90", 4, 32, 16, 4
LIMITS = {"max_seqs": 8, "max_seq_len": 128, "max_tokens": 64, "max_spec_tokens": SPEC}
HEADS = {"global": ((8, 2), (4, 1)), "local": ((6, 3),)}


def build(tmp_path, name="fake_kernels", layers=("global",), arch=ARCH, features=None):
    """A hand-made package folder: its manifest and rows, as the generator would write them. `features`: manifest
    fields of every layer and its attention variants.
    """
    features = features or {}
    variants, attention_rows, append_rows, merge_rows, varlen_rows = {}, [], [], [], []

    def variant(symbol, family, query_heads, kv_heads, aligned, **facts):
        variants[symbol] = {
            "family": family,
            "module": f"kernels/{symbol}.py",
            "query_heads": query_heads,
            "kv_heads": kv_heads,
            "qk_dim": QK,
            "v_dim": V,
            "page_size": PAGE,
            "dtype": "float32",
            "mask": "causal",
            "scale": QK**-0.5,
            "max_query_len": None,
            "block_m": None,
            "tile_n": None,
            "num_warps": 4,
            "num_stages": 2,
            "ctas_per_multiprocessor": 2,
            "aligned": aligned,
            "alignment": 16 if aligned else 1,
            "tuning": "none",
            "binaries": {
                arch: {
                    "file": f"binaries/{arch}/{symbol}.cubin",
                    "sha256": "0" * 64,
                    "shared_bytes": 1024,
                    "num_threads": 128,
                    "registers": 64,
                    "spill_bytes": 0,
                    "main_loop_spills": 0,
                    "occupancy": 4,
                    "function": symbol,
                }
            },
        } | facts
        return symbol

    for layer in layers:
        for query_heads, kv_heads in HEADS[layer]:
            for aligned in (True, False):
                tail = f"{layer}_{query_heads}_{kv_heads}_{'a' if aligned else 'u'}"
                split = {"max_query_len": SPEC, "block_m": 16, "tile_n": 16, **features}
                decode = variant(f"decode_{tail}", "decode", query_heads, kv_heads, aligned, **split)
                prefill = variant(
                    f"prefill_{tail}", "prefill", query_heads, kv_heads, aligned, **split | {"block_m": 32}
                )
                whole = split | {"max_query_len": None, "block_m": 32, "layout": "NHD"}
                varlen = variant(f"varlen_{tail}", "varlen", query_heads, kv_heads, aligned, **whole)
                facts = (len(varlen_rows), arch, layer, query_heads, kv_heads, aligned, varlen, "varlen")
                varlen_rows.append(VarlenRow(*facts))
                names = ("layout", "rotary_dim", "rotary_style")
                more = {name: features[name] for name in names if name in features}
                append = variant(f"append_{tail}", "append_kv", query_heads, kv_heads, aligned, **more)
                for low, high, symbol in ((1, SPEC, None), (SPEC + 1, LIMITS["max_tokens"], prefill)):
                    facts = (
                        len(attention_rows),
                        arch,
                        layer,
                        query_heads,
                        kv_heads,
                        aligned,
                        low,
                        high,
                        decode,
                        symbol,
                    )
                    attention_rows.append(AttentionRow(*facts, "mixed" if symbol else "decode only"))
                append_rows.append(
                    AppendRow(len(append_rows), arch, layer, kv_heads, aligned, append, "append")
                )
            merge = variant(f"merge_{query_heads}", "merge_states", query_heads, kv_heads, True)
            merge_rows.append(MergeRow(len(merge_rows), arch, query_heads, V, merge, "merge"))
    manifest = {
        "format": 1,
        "package": name,
        "distribution": name.replace("_", "-"),
        "version": "0.1.0",
        "specgen": "0.1.0",
        "triton": "3.7.1",
        "ptxas": "12.8",
        "launcher_compiler": "cc",
        "spec": {"name": "fake", "sha256": "1" * 64, "file": "spec.yaml"},
        "oldest_driver": {arch: "525.60.13"},
        "limits": LIMITS,
        "variants": variants,
        "targets": [
            {
                "id": "h200",
                "arch": arch,
                "multiprocessors": 132,
                "shared_memory_per_block": 232448,
                "memory_bandwidth_GBps": 4800.0,
                "matrix_rate_TFLOPs": 989.0,
            }
        ],
        "layers": [
            {
                "name": layer,
                "layers": "all",
                "query_heads": HEADS[layer][0][0],
                "kv_heads": HEADS[layer][0][1],
                "qk_dim": QK,
                "v_dim": V,
                "scale": QK**-0.5,
                "mask": "causal",
                "page_size": PAGE,
                "dtype": "float32",
            }
            | features
            for layer in layers
        ],
        "dispatch": [
            {"arch": arch, "layer": layer, "tensor_parallel": 1, "aligned": True, "measured_on": None, "regret": {}}
            for layer in layers
        ],
    }
    directory = tmp_path / name
    directory.mkdir(exist_ok=True)
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory, attention_rows, append_rows, merge_rows, varlen_rows


class FakeDevice:
    """Records (symbol, grid, stream, arguments by name) and computes what the kernel would."""

    mode, multiprocessors, index, arch = "fake", 3, 0, ARCH

    def __init__(self, manifest, compute=True):
        self.variants, self.compute, self.launches, self.loaded = manifest["variants"], compute, [], []
        self.refuse = False

    def kernel(self, symbol):
        if self.refuse and symbol not in self.loaded:
            raise CaptureError(f"{symbol} is not loaded: call warmup() before the capture")
        self.loaded.append(symbol)
        variant = self.variants[symbol]
        names = [argument.name for argument in variant_call_arguments(variant)]

        def run(grid, stream, *args):
            assert len(args) == len(names)
            given = dict(zip(names, args))
            self.launches.append((symbol, grid, stream, given))
            if self.compute:
                getattr(self, "run_" + variant["family"])(variant, given)

        return run

    def beside(self, symbol, late):
        return self.kernel(symbol)

    def serving(self, symbol):
        return symbol

    def load_all(self):
        for symbol in self.variants:
            self.kernel(symbol)

    def run_decode(self, variant, a):
        assert not a["counters_ptr"].any()
        self.run_rows(variant, a, lambda rows: 1 <= rows <= variant["max_query_len"])

    def run_prefill(self, variant, a):
        self.run_rows(variant, a, lambda rows: rows > variant["max_query_len"])

    def run_rows(self, variant, a, mine):
        paged = {name: a[name + "_ptr"] for name in ("block_table", "seq_lens", "cu_seqlens_q")}
        out, lse = reference.attention(
            a["q_ptr"], a["k_cache_ptr"], a["v_cache_ptr"], **paged, **formula(variant), **extras(a)
        )
        starts = a["cu_seqlens_q_ptr"].tolist()
        for first, last in zip(starts, starts[1:]):
            if mine(last - first):
                a["out_ptr"][first:last] = out[first:last].to(a["out_ptr"].dtype)
                if a["store_lse"]:
                    a["lse_ptr"][first:last] = lse[first:last].float()

    def run_varlen(self, variant, a):
        lengths = {name: a[name + "_ptr"] for name in ("cu_seqlens_q", "cu_seqlens_k")}
        out, lse = reference.attention_varlen(
            a["q_ptr"], a["k_ptr"], a["v_ptr"], **lengths, **formula(variant), **extras(a)
        )
        last = int(a["cu_seqlens_q_ptr"][-1])
        a["out_ptr"][:last] = out[:last].to(a["out_ptr"].dtype)
        if a["store_lse"]:
            a["lse_ptr"][:last] = lse[:last].float()

    def run_append_kv(self, variant, a):
        caches, slots, k = (a["k_cache_ptr"], a["v_cache_ptr"]), a["slot_mapping_ptr"], a["k_ptr"]
        if "q_ptr" in a:
            turn = a["positions_ptr"], a["cos_ptr"], a["sin_ptr"], variant["rotary_style"]
            a["q_out_ptr"].copy_(reference.rotate(a["q_ptr"], *turn))
            k = reference.rotate(k, *turn)
        layout = variant.get("layout", "NHD")
        reference.append_kv(k, a["v_ptr"], *caches, slot_mapping=slots, layout=layout)

    def run_merge_states(self, variant, a):
        out, lse = reference.merge_states(a["out_a_ptr"], a["lse_a_ptr"], a["out_b_ptr"], a["lse_b_ptr"])
        a["out_ptr"].copy_(out)
        a["lse_ptr"].copy_(lse)


def formula(fields):
    """What the reference needs to know of a manifest's variant."""
    names = ("mask", "scale", "sliding_window", "chunk", "softcap", "layout")
    return {name: fields[name] for name in names if name in fields}


def extras(a):
    """The feature tensors among a launch's arguments, as a kernel would read them."""
    found = {}
    if "sinks_are_f32" in a:
        found["sinks"] = a["sinks_f32_ptr"] if a["sinks_are_f32"] else a["sinks_bf16_ptr"]
    if "alibi_slopes_ptr" in a:
        found["alibi_slopes"] = a["alibi_slopes_ptr"]
    if a.get("num_prefix_ranges"):
        found["prefix_ranges"] = a["prefix_ranges_ptr"]
    return found


def fake(tmp_path, compute=True, **options):
    opened = []

    def open_device(directory, manifest, torch_device):
        opened.append(FakeDevice(manifest, compute))
        return opened[-1]

    directory, *rows = build(tmp_path, **options)
    package = Package(options.get("name", "fake_kernels"), directory, *rows, open_device=open_device)
    package.opened = opened
    return package


def batch(lens=((1, 9), (2, 5), (0, 3), (1, 1)), heads=(8, 2), pages=16, max_pages=8, seed=0, layout="NHD"):
    """Arguments of one call: positional tensors and keywords."""
    make = torch.Generator().manual_seed(seed)
    tokens = sum(m for m, _ in lens)
    randn = lambda *shape: torch.randn(*shape, generator=make)  # noqa: E731
    q = randn(tokens, heads[0], QK)
    near = (heads[1], PAGE) if layout == "HND" else (PAGE, heads[1])
    caches = randn(pages, *near, QK), randn(pages, *near, V)
    starts = [0]
    for m, _ in lens:
        starts.append(starts[-1] + m)
    keywords = {
        "block_table": torch.randint(0, pages, (len(lens), max_pages), generator=make, dtype=torch.int32),
        "seq_lens": torch.tensor([n for _, n in lens], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor(starts, dtype=torch.int32),
    }
    return [q, *caches], keywords


def packed(lens=((1, 9), (2, 5), (0, 3), (1, 1)), heads=(8, 2), seed=0):
    """Arguments of one attention_varlen call: positional tensors and keywords."""
    make = torch.Generator().manual_seed(seed)
    tokens, key_tokens = sum(m for m, _ in lens), sum(n for _, n in lens)
    shapes = (tokens, heads[0], QK), (key_tokens, heads[1], QK), (key_tokens, heads[1], V)
    keywords = {
        f"cu_seqlens_{name}": torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for name, lengths in (("q", [m for m, _ in lens]), ("k", [n for _, n in lens]))
    }
    return [torch.randn(*shape, generator=make) for shape in shapes], keywords


def expected(tensors, keywords, **features):
    return reference.attention(*tensors, **keywords, **features)


def launched(package):
    return package.opened[0].launches


def kv(tokens=5, heads=2, pages=16):
    k, v = torch.randn(tokens, heads, QK), torch.randn(tokens, heads, V)
    caches = torch.zeros(pages, PAGE, heads, QK), torch.zeros(pages, PAGE, heads, V)
    return {
        "k": k,
        "v": v,
        "k_cache": caches[0],
        "v_cache": caches[1],
        "slot_mapping": torch.tensor([3, -1, 63, 64, 0])[:tokens],
    }


def append(package, given):
    given = dict(given)
    return package.append_kv(
        given.pop("k"), given.pop("v"), given.pop("k_cache"), given.pop("v_cache"), **given
    )


def states(tokens=3, heads=8):
    return [
        torch.randn(tokens, heads, V),
        torch.randn(tokens, heads),
        torch.randn(tokens, heads, V),
        torch.randn(tokens, heads),
    ]


def misaligned(tensor):
    """The same values one element further: a pointer that is no multiple of 16 bytes."""
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:]
    return flat.view(tensor.shape).copy_(tensor)


def padded(tensor, dim=0):
    """The same values with one odd stride."""
    shape = list(tensor.shape)
    wide = torch.zeros(*shape[:dim], shape[dim] * 1, *shape[dim + 1 : -1], shape[-1] + 1)
    wide[..., :-1] = tensor
    return wide[..., :-1]
