"""Small calls of installed packages under NVIDIA's compute-sanitizer: memory, shared memory, barriers, initialisation.

    python tests/gpu/sanitize.py [--sanitizer PATH] [--tools memcheck,racecheck] [--kernels decode] PACKAGE ...

PATH is the program itself (default: compute-sanitizer of $PATH), which the wheel nvidia-cuda-sanitizer-api 13.5.25 holds in
nvidia/cu13/compute-sanitizer (that of 13.0.85 lacks TreeLauncherSubreaper, and starts nothing). Prints a line for each package and tool: calls, errors, seconds, verdict; then what was found. Exit status 1
unless all are clean.

A package's calls run in a process of their own, through every kernel that an attention or varlen row of the GPU launches. They
are made on the host and copied, so that hardly a kernel but the package's own runs under the tool, every tensor is an
allocation of its own, and all but outputs and scratch is initialised. The oracle is the package's float64 reference, on the host.
"""

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ENDED = "calls that were right: "
TOOLS = {  # and their own options: failed calls of the API show up in Python
    "memcheck": ["--report-api-errors", "no", "--padding", str(1 << 16)],
    "racecheck": [],
    "synccheck": [],
    "initcheck": [],
}
FOUND = 9  # exit status where a tool found errors
SHOWN = 24  # lines of what a tool found
# (query rows, cached keys) of each sequence; SPEC: the package's max_spec_tokens.
SPEC = -1
BATCHES = {
    "decode": ((1, 0), (1, 15), (1, 16), (1, 299), (1, 150), (1, 63)),
    "speculative": ((SPEC, 0), (SPEC, 29), (SPEC, 290), (1, 120), (0, 40)),
    "prefill": ((70, 0), (1, 0), (33, 0)),
    "chunk": ((40, 215), (17, 33), (129, 128)),
    "mixed": ((90, 30), (1, 299), (1, 4), (0, 7), (SPEC, 77)),
}


class Calls:
    """One package's calls on this process's device."""

    def __init__(self, name: str):
        import torch

        self.torch, self.package = torch, importlib.import_module(name)
        self.dispatch = importlib.import_module(f"{name}.dispatch")
        self.testing = importlib.import_module(f"{name}.runtime.testing")
        self.checks, self.pools, self.packed = (
            importlib.import_module(f"{name}.runtime.testing.{part}") for part in ("checks", "pools", "packed")
        )
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")  # cpu: the interpreter
        opened = self.checks.open_device(self.package, self.device)
        self.manifest, self.arch = opened.manifest, opened.arch
        self.expected: dict[tuple, tuple] = {}

    def run(self) -> int:
        """Every batch through every row of its kernels; the number of calls. AssertionError where one is wrong."""
        count = 0
        for row in self._rows(self.dispatch.ATTENTION_ROWS):
            serving = self.package.attention.__self__.pinned(row)
            most = self.manifest["limits"]["max_tokens"]
            if not row.prefill:
                most = self.manifest["variants"][row.decode]["max_query_len"]
            count += sum(self._call(serving, row, name, most) for name in BATCHES)
        for row in self._rows(self.dispatch.VARLEN_ROWS):
            count += sum(self._call(None, row, name, self.manifest["limits"]["max_tokens"]) for name in BATCHES)
        return count

    def _rows(self, rows) -> list:
        """As many of this GPU's as launch every kernel, first those of a decode and a prefill kernel."""
        found, launched = [], set()
        for row in sorted((row for row in rows if row.arch == self.arch), key=lambda row: -len(row.symbols)):
            if not launched.issuperset(row.symbols):
                found.append(row)
                launched.update(row.symbols)
        return found

    def _call(self, serving, row, name: str, most: int) -> bool:
        """One call, through `serving` or as attention_varlen (None); False where the row takes fewer query rows."""
        spec = self.manifest["limits"]["max_spec_tokens"]
        sequences = tuple((spec if rows == SPEC else rows, cached) for rows, cached in BATCHES[name])
        bound = max(rows for rows, _ in sequences)
        if bound > most:
            return False
        case = self.testing.Case.of_layer(self.manifest, row.layer, row.query_heads, row.kv_heads)
        pool_type = self.packed.PackedPool if serving is None else self.pools.Pool
        batch, host = self.testing.Batch(name, sequences), self.torch.device("cpu")
        pool = pool_type(case, host, [batch], "plain" if row.aligned else "odd")
        pool.load(batch, fill=float("nan"))  # and -1 behind the block table's entries
        key = row.layer, row.query_heads, row.kv_heads, name, serving is None
        if key not in self.expected:
            self.expected[key] = pool.expected()
        given = {
            word: self._to_device(value) if isinstance(value, self.torch.Tensor) else value
            for word, value in pool.arguments().items()
        }
        options = {"max_seqlen_q": bound, "return_lse": True}
        label = f"{name} through {', '.join(row.symbols)}"
        if serving is None:
            _, lse = self.package.attention_varlen(**given, **options)
        else:
            options["workspace"] = serving.workspace(self.device)
            _, lse = serving.attention(**given, **options)
            counters = options["workspace"].counters.cpu()
            assert not counters.any(), f"{label}: counters of the workspace are not zero"
        self._flat(pool.out).copy_(self._flat(given["out"]))
        self.checks.assert_matches(pool, lse.cpu(), label, self.expected[key])
        return True

    def _flat(self, tensor):
        return self.torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())

    def _to_device(self, tensor):
        """The same view of a copy of its whole memory."""
        moved = self._flat(tensor).to(self.device, copy=True)
        return moved.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def sanitize(sanitizer: str, tool: str, package: str, kernels: str) -> tuple[str, list[str]]:
    """(the line, what was found) of one package under one tool, in kernels with `kernels` in their names."""
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "application-only", *TOOLS[tool]]
    if kernels:
        options += ["--kernel-name", f"kernel_substring={kernels}"]
    ours = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "SPECGEN_NO_JIT": "1", "OMP_NUM_THREADS": "2"}
    command = [sanitizer, *options, sys.executable, str(Path(__file__).resolve()), "--calls", package]
    begun = time.monotonic()
    done = subprocess.run(command, env={**os.environ, **ours}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = done.stdout.splitlines()
    calls = next((line.removeprefix(ENDED) for line in lines if line.startswith(ENDED)), None)
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", done.stdout)
    errors = summary[1] if summary else "-"
    if summary is None:
        verdict = f"NOT CHECKED: {tool} did not start, or did not end (exit status {done.returncode})"
    elif errors != "0" or done.returncode == FOUND:
        verdict = "ERRORS"
    elif calls is None or done.returncode:
        verdict = f"FAILED: the calls ended with exit status {done.returncode}"
    else:
        verdict = "clean"
    found = [] if verdict == "clean" else [f"{package}, {tool}: {verdict}", *_shown(lines, errors)]
    return f"{package:32} {tool:10} {calls or '-':>6} {errors:>7} {time.monotonic() - begun:8.1f}  {verdict}", found


def _shown(lines: list[str], errors: str) -> list[str]:
    """The first lines of what the tool found; where it found nothing, the last of the output."""
    of_tool = [line for line in lines if line.startswith("=========")]
    return of_tool[:SHOWN] if errors not in ("0", "-") else lines[-SHOWN:]


def main() -> int:
    """What the command line asks for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", nargs="+", metavar="PACKAGE", help="import names of installed packages")
    parser.add_argument("--sanitizer", default="compute-sanitizer", metavar="PATH", help="the program (that of $PATH)")
    parser.add_argument("--tools", default=",".join(TOOLS), help=f"of {', '.join(TOOLS)}, by commas (all)")
    parser.add_argument("--kernels", default="", metavar="TEXT", help="watch kernels with TEXT in their names (all)")
    parser.add_argument("--calls", action="store_true", help="make the calls in this process, under no tool")
    options = parser.parse_args()
    if options.calls:
        for package in options.packages:
            print(f"{ENDED}{Calls(package).run()}", flush=True)
        return 0
    tools = options.tools.split(",")
    if unknown := set(tools) - set(TOOLS):
        parser.error(f"--tools: unknown {', '.join(sorted(unknown))}; known: {', '.join(TOOLS)}")
    if shutil.which(options.sanitizer) is None:
        parser.error(f"--sanitizer {options.sanitizer}: no such program; pip install nvidia-cuda-sanitizer-api, and name its file")
    print(f"{'package':32} {'tool':10} {'calls':>6} {'errors':>7} {'seconds':>8}  verdict", flush=True)
    unclean: list[str] = []
    for package in options.packages:
        for tool in tools:
            line, found = sanitize(options.sanitizer, tool, package, options.kernels)
            print(line, flush=True)
            unclean += found
    print(*unclean, sep="\n")
    return int(bool(unclean))


if __name__ == "__main__":
    sys.exit(main())
