"""Fault rows 1 to 12, 14, 15 and 20 to 24 on a GPU, over installed packages built from
tests/gpu/specs.py; the rows of windows, sinks and the like are in feature_faults.py.

    python tests/gpu/specs.py build/fault_specs && (specgen build each, pip install each)
    python tests/gpu/faults.py                     # every faults_* package found
    python tests/gpu/faults.py some_model_kernels  # these packages

Runs the binaries only: importing triton raises and PATH is empty (row 21). Prints one line per row and
package: runs, the worst error in units of its tolerance, verdict; then what failed. Exit status 1 if anything
did. Oracles: the package's float64 reference; identical bits whether the cache around the keys holds 0, NaN
or Inf; means of visible positions.
"""

import importlib
import json
import os
import pkgutil
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections import defaultdict
from importlib.machinery import ModuleSpec
from pathlib import Path

import torch
from feature_faults import feature_rows

NAN, INF = float("nan"), float("inf")
ROW_OF_BATCH = {
    "stale_tail": "1 stale bytes",
    "empty_split": "4 empty split",
    "empty_sequences": "5 zero lengths",
    "empty_batch": "5 zero lengths",
    "head_dim": "9 head size",
    "groups": "10 group size",
    "surplus_programs": "15 surplus programs",
    "page_sizes": "24 page size",
    "reach_rows": "11 window edge",
    "reach_tiles": "3 hidden tile",
    "reach_prefill": "11 window edge",
}


class NoTriton:
    """Import hook: importing Triton raises. It can still be found: torch asks that when CUDA starts."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name.split(".")[0] == "triton" else None

    def create_module(self, spec):
        raise ImportError("tests/gpu/faults.py refuses triton")

    def exec_module(self, module):
        raise ImportError("tests/gpu/faults.py refuses triton")


class Table:
    """What ran: per (row, package) the number of runs, the worst error relative to its tolerance, the
    failures.
    """

    def __init__(self):
        self.runs = defaultdict(int)
        self.worst = defaultdict(float)
        self.failures = defaultdict(list)

    def run(self, row: str, package: str, label: str, check) -> None:
        """Call check() -> error in units of the tolerance, or None; a raised exception is a failure."""
        key = row, package
        self.runs[key] += 1
        try:
            self.worst[key] = max(self.worst[key], check() or 0.0)
        except Exception as error:  # noqa: BLE001 - the table reports whatever came
            text = "".join(traceback.format_exception_only(error)).strip()
            self.failures[key].append(f"{label}: {text[:600]}")
            if "CUDA error" in text or "illegal memory" in text:
                self.print()
                sys.exit("the CUDA context is lost; nothing after this can run")

    def print(self) -> None:
        print(f"{'row':24}{'package':34}{'runs':>6}{'error/bound':>13}  verdict")
        for (row, package), runs in sorted(
            self.runs.items(), key=lambda item: (int(item[0][0].split()[0]), item[0][1])
        ):
            failed = self.failures.get((row, package), [])
            verdict = f"FAILED {len(failed)}" if failed else "ok"
            print(f"{row:24}{package:34}{runs:6}{self.worst[row, package]:13.3f}  {verdict}")
        for (row, package), failed in self.failures.items():
            for text in failed[:5]:
                print(f"\nrow {row}, {package}: {text}")


class Subject:
    """One package and its layers as cases."""

    def __init__(self, name: str):
        self.name = name
        self.package = importlib.import_module(name)
        self.testing = importlib.import_module(f"{name}.runtime.testing")
        self.reference = importlib.import_module(f"{name}.runtime.reference")
        self.directory = Path(self.package.__file__).parent
        self.manifest = json.loads((self.directory / "manifest.json").read_text(encoding="utf-8"))
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.rows = importlib.import_module(f"{name}.dispatch").ATTENTION_ROWS

    def cases(self):
        """A Case per layer and head counts; the symbol is left to the dispatch."""
        for heads in dict.fromkeys((r.layer, r.query_heads, r.kv_heads) for r in self.rows):
            yield self.testing.Case.of_layer(self.manifest, *heads)

    def call(self, pool, **options):
        return self.package.attention(**pool.arguments(), **options)

    def error(self, found, case) -> float:
        """The worst of the errors in units of its bound."""
        bounds = self.reference.tolerance(case.torch_dtype)
        return max(found.tensor / bounds.tensor, found.row / bounds.row, found.lse)

    def check_batch(self, case, batch, layout: str) -> float:
        """Reference, poison, canaries and scratch, for one batch in one layout; with the caller's bound and
        without.
        """
        testing = self.testing
        fitted = testing.fit(batch, case, case.max_tokens)
        pool = testing.Pool(
            case, self.device, [fitted], layout, min_tokens=min(case.max_tokens, fitted.tokens + 3)
        )
        workspace = testing.poisoned_workspace(self.package, self.device)
        bound = max((q for q, _ in fitted.sequences), default=0)
        bits, worst = {}, 0.0
        for options in (dict(max_seqlen_q=bound), {}):
            for fill in (0.0, NAN, INF):
                pool.load(fitted, fill=fill)
                _, lse = self.call(pool, return_lse=True, workspace=workspace, **options)
                if fill == 0.0:
                    found = testing.assert_matches(
                        pool, lse, f"{case.layer} {fitted.sequences} {layout} {options}"
                    )
                    worst = max(worst, self.error(found, case))
                bits[fill] = testing.bits(pool.result())
                assert pool.canaries_intact(), f"filled with {fill}: wrote outside its rows"
                testing.assert_scratch_sound(workspace, f"filled with {fill}")
            assert torch.equal(bits[0.0], bits[NAN]), f"{options}: NaN around the keys changes the result"
            assert torch.equal(bits[0.0], bits[INF]), f"{options}: Inf around the keys changes the result"
        workspace = self.package.workspace(self.device)
        for scratch in (workspace.partial_acc, workspace.partial_ml):
            scratch.zero_()
        pool.load(fitted)
        self.call(pool, workspace=workspace)
        assert torch.equal(testing.bits(pool.result()), bits[0.0]), "the scratch's contents change the result"
        return worst

    def check_positions(self, case, batch) -> float:
        """k = 0, v[j] = j: every row is the mean of the positions it sees; an edge that is off by one shows
        as 0.5.
        """
        pool = self.testing.Pool(case, self.device, [batch])
        pool.load(batch, fill=NAN, values="positions")
        self.call(pool)
        off = (pool.result().double() - pool.expected()[0]).abs().max().item()
        assert off < 0.25, f"{case.layer}: a mean of visible positions is off by {off}"
        return off

    def check_far_pages(self, case, layout: str) -> float:
        """Pages on both sides of 2^31 elements give the bits of pages 0 and 1, read by attention and written
        by append_kv.
        """
        testing, per_page = self.testing, case.page_size * case.kv_heads * case.v_dim
        far = 2**31 // per_page
        batches = (
            testing.Batch("decode", ((1, 2 * case.page_size - 1),)),
            testing.Batch("prefill", ((2 * case.page_size, 0),)),
        )
        pool = testing.Pool(case, self.device, batches, layout, spare_pages=far + 3)
        for batch in batches:
            seen = []
            for pages in ((0, 1), (far - 1, far), (far, far + 1)):
                pool.load(batch, fill=NAN, pages=pages)
                self.call(pool)
                seen.append(testing.bits(pool.result()))
                testing.assert_matches(pool, None, f"pages {pages}")
            assert torch.equal(seen[0], seen[1]) and torch.equal(
                seen[0], seen[2]
            ), f"{batch}: far pages give other bits"
        slots = torch.tensor([far * case.page_size - 1, far * case.page_size, 5], device=self.device)
        k, v = (
            torch.randn(3, case.kv_heads, d, device=self.device).to(case.torch_dtype)
            for d in (case.qk_dim, case.v_dim)
        )
        self.package.append_kv(k, v, pool.k_cache, pool.v_cache, slot_mapping=slots, layer=case.layer)
        for new, cache in ((k, pool.k_cache), (v, pool.v_cache)):
            assert torch.equal(
                pool.by_slot(cache)[slots // case.page_size, slots % case.page_size], new
            ), "append_kv missed a far page"
        return 0.0

    def check_empty_merge(self, case) -> float:
        """(0, -inf) merged with (0, -inf), and with a state that has keys, in the dtype's bits."""
        shape = 3, case.query_heads, case.v_dim
        none = torch.zeros(shape, dtype=case.torch_dtype, device=self.device), torch.full(
            shape[:2], -INF, device=self.device
        )
        some = torch.randn(shape, device=self.device).to(case.torch_dtype), torch.randn(
            shape[:2], device=self.device
        )
        out, lse = self.package.merge_states(*none, *none)
        assert (out == 0).all() and (lse == -INF).all(), "merging two empty states does not give (0, -inf)"
        for states in ((*none, *some), (*some, *none)):
            out, lse = self.package.merge_states(*states)
            assert torch.equal(out, some[0]), "merging with an empty state changes the other"
            assert torch.allclose(
                lse, some[1], rtol=1e-6, atol=1e-6
            ), "merging with an empty state changes the lse"
        return 0.0


def sweep(table: Table, subject: Subject) -> None:
    """Rows 1, 4, 5, 9, 10, 15, 24: every batch on every layer; large batches in one layout only."""
    for case in subject.cases():
        for batch in (*subject.testing.BATCHES, *subject.testing.edge_batches(case)):
            row = ROW_OF_BATCH.get(batch.name, "0 other batches")
            if case.chunk and batch.name.startswith("reach"):
                row = "23 chunk"
            for layout in ("plain",) if batch.large else subject.testing.LAYOUTS:
                label = f"{case.layer}, {batch.name}, {layout}"
                table.run(row, subject.name, label, lambda: subject.check_batch(case, batch, layout))
        if not (case.sinks or case.alibi):  # a mean of positions
            uniform = subject.testing.Batch("positions", ((1, 39), (40, 0), (7, 33), (17, 80)))
            label = f"{case.layer}, positions"
            table.run("1 stale bytes", subject.name, label, lambda: subject.check_positions(case, uniform))
        table.run(
            "4 empty split", subject.name, f"{case.layer}, merge", lambda: subject.check_empty_merge(case)
        )


def scratch(table: Table, subject: Subject) -> None:
    """Row 8: 64 sequences of 2 rows over 500 keys, then one of 8; `check_batch` looks behind every array of the scratch."""
    for case in subject.cases():
        for batch in (((2, 498),) * 64, ((8, 492),)):
            named = subject.testing.Batch(f"{len(batch)} sequences", batch)
            label = f"{case.layer}, {named.name}"
            table.run("8 scratch per row", subject.name, label, lambda: subject.check_batch(case, named, "plain"))


def far_pages(table: Table, subject: Subject) -> None:
    """Row 7, on layers like the table's: 8 kv heads of 128, pages of 16."""
    for case in subject.cases():
        if (case.kv_heads, case.qk_dim, case.v_dim, case.page_size) == (8, 128, 128, 16):
            for layout in ("plain", "views"):
                label = f"{case.layer}, {layout}"
                table.run("7 page offset", subject.name, label, lambda: subject.check_far_pages(case, layout))


def captures(subject: Subject) -> None:
    """Row 14, in a process whose first call is inside a capture: the named error without warmup, then
    replays.
    """
    errors = importlib.import_module(f"{subject.name}.runtime.errors")
    case = next(subject.cases())
    batch = subject.testing.Batch("some", ((1, 10),))
    pool = subject.testing.Pool(case, subject.device, [batch])
    pool.load(batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            subject.call(pool)
    except errors.CaptureError as error:
        print(f"without warmup: {type(error).__name__}: {error}")
    else:
        raise AssertionError("a first call inside a capture without warmup raised nothing")
    subject.package.warmup(subject.device)
    variants = subject.manifest["variants"]
    for case in subject.cases():
        for row in subject.rows:
            if (row.layer, row.query_heads, row.kv_heads) == (case.layer, case.query_heads, case.kv_heads):
                for symbol in row.symbols:
                    fields = case.__dict__ | dict(
                        symbol=symbol, family=variants[symbol]["family"], aligned=row.aligned
                    )
                    subject.testing.check_graph_replay(subject.package, subject.testing.Case(**fields))


def in_fresh_process(code: str, *, path: tuple[str, ...] = (), **environment: str) -> str:
    """Run Python code in a new process with these folders first on its path; returns what it printed, raises
    if it failed.
    """
    places = os.pathsep.join([*path, *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": places, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{code!r} failed:\n{done.stderr[-1500:]}"
    return done.stdout


WARM = """
import torch, {name} as package
from {name}.runtime.errors import NoBinaryError, DamagedBinaryError
try:
    package.warmup(torch.device("cuda"))
except (NoBinaryError, DamagedBinaryError) as error:
    print(error)
else:
    raise SystemExit("warmup raised nothing")
"""


def check_damage(subject: Subject, damage: str) -> None:
    """Row 20: one binary of many deleted, emptied or altered: warmup raises a named error that names the
    file.
    """
    arch = subject.testing.open_device(subject.package, subject.device).arch
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / subject.name
        shutil.copytree(subject.directory, copy)
        victim = sorted((copy / "binaries" / arch).iterdir())[1]
        image = victim.read_bytes()
        victim.unlink()
        if damage == "altered":
            victim.write_bytes(
                image[: len(image) // 2] + bytes([image[len(image) // 2] ^ 1]) + image[len(image) // 2 + 1 :]
            )
        elif damage == "emptied":
            victim.touch()
        said = in_fresh_process(WARM.format(name=subject.name), path=(folder,))
        assert victim.name in said, f"the error does not name {victim.name}: {said}"


def processes(table: Table, subject: Subject) -> None:
    """Rows 14, 20 and 22: each in a process of its own."""
    here = str(Path(__file__).parent)
    capture = f"import faults; faults.refuse_compilers(); faults.captures(faults.Subject({subject.name!r}))"
    table.run(
        "14 first call captured",
        subject.name,
        "capture",
        lambda: print(in_fresh_process(capture, path=(here,)), end=""),
    )
    for damage in ("deleted", "emptied", "altered"):
        table.run("20 damaged binary", subject.name, damage, lambda: check_damage(subject, damage))
    no_gpu = f"import {subject.name} as package; print(package.describe()); print(package.__version__)"
    hidden = dict(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    table.run("22 no GPU", subject.name, "describe", lambda: in_fresh_process(no_gpu, **hidden) and None)


def refuse_compilers() -> None:
    """Row 21: no Triton, no compiler on PATH, no JIT, for this process and those it starts."""
    sys.meta_path.insert(0, NoTriton())
    os.environ.update(PATH="", SPECGEN_NO_JIT="1")


def main() -> int:
    names = sys.argv[1:] or sorted(m.name for m in pkgutil.iter_modules() if m.name.startswith("faults_"))
    if not names:
        sys.exit("no packages: build and install the specs that tests/gpu/specs.py writes, or name packages")
    refuse_compilers()
    table = Table()
    for name in names:
        subject = Subject(name)
        sweep(table, subject)
        feature_rows(table, subject)
        scratch(table, subject)
        far_pages(table, subject)
        processes(table, subject)
        mode = "triton" in sys.modules and getattr(sys.modules["triton"], "__file__", None)
        table.run(
            "21 no compiler",
            name,
            "triton imported",
            lambda: _require(not mode, f"triton was imported from {mode}"),
        )
        print(f"{name}: done", flush=True)
    table.print()
    return int(any(table.failures.values()))


def _require(condition: bool, message: str) -> None:
    assert condition, message


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
