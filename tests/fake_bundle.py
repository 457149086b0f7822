"""A hand-made bundle whose kernels compute with the float64 reference on a CPU, and misbehave as their names say.

The processes that run its trials are real; only the runtime's device.py is replaced. A kernel's symbol ends with what it does:
`right_2ms` takes 2 ms, `wrong`, `hang`, `killed`, `raises`, `large` do what they say, `once` is killed at its first call ever.
"""

import json
import os
import shutil
import signal
import time
from pathlib import Path

from fake_package import FakeDevice

from specgen.runtime.errors import NoBinaryError
from specgen.tuning.bundle import FILE, Bundle, Candidate, Group, read_bundle, to_json
from specgen.tuning.records import ORIGIN, Launch
from specgen.variant import Config, Geometry

RUNTIME = Path(__file__).parent.parent / "specgen" / "runtime"
ARCH, PACKAGE, ROWS = "sm_90", "bad_kernels", 4
LIMITS = {"max_seqs": 8, "max_seq_len": 64, "max_tokens": 64, "max_spec_tokens": ROWS}
GEOMETRY = Geometry(4, 2, 16, 16, "float32", 4, 0.25, "causal")
LAYER = {
    "name": "global",
    "query_heads": 4,
    "kv_heads": 2,
    "qk_dim": 16,
    "v_dim": 16,
    "scale": 0.25,
    "mask": "causal",
    "page_size": 4,
    "dtype": "float32",
    "layout": "NHD",
}
DEVICE = """
import fake_bundle

class Device:
    @staticmethod
    def open(directory, manifest, torch_device):
        return fake_bundle.Misbehaving(directory, manifest)
"""


class Misbehaving(FakeDevice):
    """What a bundle's package launches through, in the process of a trial. Logs each launch beside the package."""

    mode = "interpret"

    def __init__(self, directory, manifest):
        super().__init__(manifest)
        self.directory = Path(directory).parent
        self.answers = {}

    def kernel(self, symbol):
        if symbol.endswith("large"):
            raise NoBinaryError(f"{symbol} needs 262144 bytes of shared memory per block; the GPU has 232448")
        compute = super().kernel(symbol)

        def run(grid, stream, *args):
            with open(self.directory / "launched", "a") as log:
                log.write(f"{os.getpid()} {symbol}\n")
            self.behave(symbol)
            compute(grid, stream, *args)
            if symbol.endswith("wrong"):
                self.launches[-1][3]["out_ptr"][0] += 1

        return run

    def run_rows(self, variant, a, mine):
        """As FakeDevice, but each batch is computed once: what takes time is what the symbol says."""
        whole = a["q_ptr"].data_ptr(), a["q_ptr"].shape, a["seq_lens_ptr"].sum().item()
        if whole not in self.answers:
            super().run_rows(variant, a, lambda rows: True)
            self.answers[whole] = a["out_ptr"].clone()
            a["out_ptr"].fill_(float("nan"))
        starts = a["cu_seqlens_q_ptr"].tolist()
        for first, last in zip(starts, starts[1:]):
            if mine(last - first):
                a["out_ptr"][first:last] = self.answers[whole][first:last]

    def behave(self, symbol):
        behaviour = symbol.rsplit("_", 1)[-1]
        if behaviour.endswith("ms"):
            time.sleep(float(behaviour[:-2]) / 1e3)
        elif behaviour == "hang":
            time.sleep(3600)
        elif behaviour == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif behaviour == "raises":
            raise RuntimeError("an illegal memory access was encountered\nand more")
        elif behaviour == "once" and not (self.directory / "died").exists():
            (self.directory / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def make_bundle(
    folder: Path, decode=(), prefill=(), varlen=(), failed=(), workloads=("dec b2 k16", "dec b1 k64", "dec b4 k32"), untuned=1
) -> Bundle:
    """A bundle in `folder`; `decode` and `prefill` are behaviours, a candidate each (decode of 1 and of 4 rows; prefill alone
    and behind decode), `varlen` likewise; `failed`: (status, reason) of decode kernels that did not compile. The first of each
    is what is launched untuned, or the first `untuned`.
    """
    candidates, variants = [], {}

    def add(role, rows, number, behaviour, status="ok", detail=""):
        symbol = f"{role}_q{rows}_{number}_{behaviour}"
        config = Config(16 << number, 16, 4, 2, 1, origin="" if number < untuned else ORIGIN)
        candidates.append(Candidate(role, Launch(role, config), rows, symbol, f"digest of {symbol}", status, detail))
        if status == "ok":
            variants[symbol] = variant(role, rows, config)

    for number, behaviour in enumerate(decode):
        add("decode", 1, number, behaviour)
        add("decode", ROWS, number, behaviour)
    for number, behaviour in enumerate(prefill):
        add("prefill", 0, number, behaviour)
        add("prefill", ROWS, number, behaviour)
    for number, behaviour in enumerate(varlen):
        add("varlen", None, number, behaviour)
    for number, (status, reason) in enumerate(failed, len(decode)):
        add("decode", 1, number, "failed", status, reason)
    bundle = Bundle(
        folder=folder,
        package=PACKAGE,
        spec="bad",
        spec_sha256="0" * 64,
        arch=ARCH,
        triton="3.7.1",
        ptxas="12.8.93",
        aligned=True,
        query_lens=(1, ROWS),
        groups=(Group(GEOMETRY, LAYER, tuple(candidates)),),
        workloads=tuple(workloads),
    )
    shutil.copytree(RUNTIME, folder / PACKAGE / "runtime", ignore=shutil.ignore_patterns("__pycache__", "testing"))
    (folder / PACKAGE / "runtime" / "device.py").write_text(DEVICE)
    (folder / PACKAGE / "__init__.py").touch()
    (folder / PACKAGE / "manifest.json").write_text(json.dumps(manifest(variants)))
    (folder / FILE).write_bytes(to_json(bundle))
    return read_bundle(folder)


def variant(family, rows, config):
    facts = {name: LAYER[name] for name in ("query_heads", "kv_heads", "qk_dim", "v_dim", "page_size", "dtype", "mask", "scale")}
    sizes = {"block_m": config.block_m, "tile_n": config.tile_n, "ctas_per_multiprocessor": 1}
    launch = {"num_warps": config.num_warps, "num_stages": config.num_stages, "alignment": 16, "binaries": {}}
    return {"family": family, "module": "", "max_query_len": rows, "aligned": True, **facts, **sizes, **launch}


def manifest(variants):
    target = {"id": "h200", "arch": ARCH, "multiprocessors": 132, "shared_memory_per_block": 232448, "memory_bandwidth_GBps": 4800.0, "matrix_rate_TFLOPs": 989.4}
    return {
        "format": 1,
        "package": PACKAGE,
        "distribution": PACKAGE,
        "version": "0",
        "specgen": "0",
        "triton": "3.7.1",
        "spec": {},
        "targets": [target],
        "limits": LIMITS,
        "layers": [LAYER],
        "variants": variants,
    }


def launched(bundle: Bundle) -> list[str]:
    """The symbols that were launched, in order."""
    log = bundle.folder / "launched"
    return [line.split()[1] for line in log.read_text().splitlines()] if log.exists() else []
