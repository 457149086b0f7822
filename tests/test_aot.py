"""Ahead-of-time compiling: binaries and facts, reproducible bytes, budgets, failures, the cache."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specgen import aot, loops, resources
from specgen.binary import Binary, CompileJob
from specgen.cache import Cache, cache_key
from specgen.errors import BuildError, SpecgenError
from specgen.toolchain import ptxas_versions, toolchain_digest

SHARED_LIMITS = {
    "sm_80": 166912,
    "sm_89": 101376,
    "sm_90": 232448,
    "sm_100": 232448,
    "sm_120": 101376,
    "gfx90a": 65536,
    "gfx942": 65536,
    "gfx950": 163840,
}

ADD = """
import triton
import triton.language as tl

BLOCK: tl.constexpr = tl.constexpr(256)


@triton.jit
def add(a_ptr, b_ptr, out_ptr, count):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out_ptr + at, tl.load(a_ptr + at, mask=inside) + tl.load(b_ptr + at, mask=inside), mask=inside)
"""
ADD_SIGNATURE = (("a_ptr", "*fp32"), ("b_ptr", "*fp32"), ("out_ptr", "*fp32"), ("count", "i32"))

DOT = """
import triton
import triton.language as tl

ROWS: tl.constexpr = tl.constexpr({rows})
KEYS: tl.constexpr = tl.constexpr({keys})
DIM: tl.constexpr = tl.constexpr({dim})


@triton.jit
def dots(q_ptr, k_ptr, out_ptr, num_keys, k_stride):
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, KEYS)
    dims = tl.arange(0, DIM)
    q = tl.load(q_ptr + rows[:, None] * DIM + dims[None, :])
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(0, num_keys, KEYS):
        inside = start + cols < num_keys
        at = (start + cols)[:, None] * k_stride + dims[None, :]
        k = tl.load(k_ptr + at, mask=inside[:, None], other=0.0)
        acc += tl.dot(tl.dot(q, k.T).to(k.dtype), k)
    tl.store(out_ptr + rows[:, None] * DIM + dims[None, :], acc.to(out_ptr.dtype.element_ty))
"""


def add_job(arch: str = "sm_80", **changes) -> CompileJob:
    job = CompileJob(
        "add", arch, ADD, ADD_SIGNATURE, ((0, 16), (1, 16), (2, 16)), shared_limit=SHARED_LIMITS[arch]
    )
    return dataclasses.replace(job, **changes)


def dot_job(arch: str, *, rows=32, keys=64, dim=64, dtype="bf16", **changes) -> CompileJob:
    pointers = tuple((name, f"*{dtype}") for name in ("q_ptr", "k_ptr", "out_ptr"))
    job = CompileJob(
        "dots",
        arch,
        DOT.format(rows=rows, keys=keys, dim=dim),
        (*pointers, ("num_keys", "i32"), ("k_stride", "i64")),
        ((0, 16), (1, 16), (2, 16), (4, 8)),
        num_stages=2,
        shared_limit=SHARED_LIMITS[arch],
        targets=("some_gpu",),
    )
    return dataclasses.replace(job, **changes)


@pytest.fixture(scope="module")
def everywhere() -> dict[tuple[str, str], Binary]:
    return aot.compile_all([dot_job(arch) for arch in SHARED_LIMITS])


def test_cross_compiles_for_every_architecture(everywhere):
    assert [arch for _, arch in everywhere] == list(SHARED_LIMITS)
    for (symbol, arch), binary in everywhere.items():
        assert binary.data.startswith(b"\x7fELF")
        assert binary.extension == ("cubin" if arch.startswith("sm_") else "hsaco")
        assert binary.function == symbol
        assert binary.num_threads == 4 * (32 if arch.startswith("sm_") else 64)
        assert 0 < binary.shared_bytes <= SHARED_LIMITS[arch]
        assert 16 <= binary.registers <= 255
        assert binary.occupancy >= 1
        assert binary.main_loop_spills == 0
        assert binary.assembler.startswith("ptxas 1" if arch.startswith("sm_") else "LLVM of Triton 3")
        assert json.loads(json.dumps(binary.facts())) == binary.facts()
    assert "ptxas " + ptxas_versions(["sm_90", "gfx942"]) == everywhere["dots", "sm_90"].assembler


def test_bytes_depend_on_nothing_but_the_job(everywhere, tmp_path, monkeypatch):
    elsewhere = tmp_path / "a folder with a much longer name than the one that was used for the first build"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    monkeypatch.setattr("tempfile.tempdir", None)
    for name, value in {
        "TRITON_INTERPRET": "1",
        "TRITON_DISABLE_LINE_INFO": "0",
        "TRITON_DEFAULT_FP_FUSION": "0",
        "TRITON_OVERRIDE_ARCH": "sm80",
        "PTXAS_OPTIONS": "--opt-level 0",
        "DISABLE_PTXAS_OPT": "1",
        "DISABLE_LLVM_OPT": "1",
        "AMDGCN_USE_BUFFER_OPS": "0",
        "PYTHONHASHSEED": "7",
        "SOURCE_DATE_EPOCH": "0",
        "TZ": "Asia/Kathmandu",
    }.items():
        monkeypatch.setenv(name, value)
    archs = ("sm_90", "sm_100", "gfx942")
    again = aot.compile_all([dot_job(arch) for arch in archs], workers=1)
    for arch in archs:
        assert again["dots", arch] == everywhere["dots", arch]
        for trace in (b"/tmp", b".py", str(elsewhere).encode(), b"specgen-aot"):
            assert trace not in again["dots", arch].data
    assert list(elsewhere.iterdir()) == []


def test_the_parent_never_imports_triton():
    program = "import sys; import specgen.aot; assert not {'triton', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(aot.__file__).parents[1])


def test_progress_and_order():
    calls = []
    jobs = [add_job("sm_80"), add_job("sm_90")]
    compiled = aot.compile_all([*jobs, jobs[0]], workers=1, progress=lambda *call: calls.append(call))
    assert list(compiled) == [("add", "sm_80"), ("add", "sm_90")]
    assert sorted(calls) == [(1, 2, *calls[0][2:]), (2, 2, *calls[1][2:])]
    assert {call[3] for call in calls} == {"sm_80", "sm_90"}
    assert aot.compile_all([]) == {}


def test_refuses_jobs_that_contradict_or_name_no_architecture():
    with pytest.raises(ValueError, match="two different jobs for add on sm_80"):
        aot.compile_all([add_job(), add_job(num_warps=8)])
    with pytest.raises(BuildError, match=r"unknown architecture 'sm_70'; known: sm_80, .*gfx950"):
        aot.compile_all([dataclasses.replace(add_job(), arch="sm_70")])


def broken(symbol: str, body: str, **changes) -> CompileJob:
    """A kernel with one argument and the given body."""
    head = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
    source = f"{head}def {symbol}(x_ptr):\n    {body}\n"
    return add_job(**{"symbol": symbol, "source": source, "signature": (("x_ptr", "*fp32"),)} | changes)


def test_every_failure_is_named_and_a_dead_worker_does_not_hang():
    jobs = [
        broken("bad_type", "tl.store(x_ptr, tl.dot(1, 2))", targets=("a100_sxm", "a100_pcie")),
        broken("bad_assert", "tl.static_assert(1 == 2, 'one is not two')"),
        broken(
            "bad_asm",
            "tl.store(x_ptr, tl.inline_asm_elementwise('no.such $0;', '=r', [], tl.float32, True, 1))",
        ),
        broken("bad_name", "tl.store(x_ptr, 1.0)", signature=(("y_ptr", "*fp32"),)),
        broken("bad_option", "tl.store(x_ptr, 1.0)", options=(("maxnregs", 3),)),
        add_job(symbol="bad_syntax", source="def f(:\n"),
        add_job(symbol="bad_import", source="import no_such_module\n"),
        add_job(symbol="absent", source="import triton\n"),
        add_job(symbol="killed", source="import os\nos.kill(os.getpid(), 9)\n"),
        add_job(
            symbol="crashed",
            source="import os, sys\nprint('last words', file=sys.stderr, flush=True)\nos.abort()\n",
        ),
        add_job(),
    ]
    with pytest.raises(BuildError) as caught:
        aot.compile_all(jobs)
    lines = str(caught.value).splitlines()
    said = {line.split(" for sm_80")[0]: line for line in lines}
    assert list(said) == [job.symbol for job in jobs[:-1]] and len(lines) == len(said)
    assert (
        "bad_type for sm_80 (a100_sxm, a100_pcie): in 'tl.store(x_ptr, tl.dot(1, 2))': " in said["bad_type"]
    )
    assert said["bad_assert"].endswith("one is not two")
    assert "no.such" in said["bad_asm"] or "Unknown" in said["bad_asm"] or "Not a name" in said["bad_asm"]
    assert "takes (x_ptr), the signature has (y_ptr)" in said["bad_name"]
    assert "has no option maxnregs for sm_80" in said["bad_option"]
    assert said["bad_syntax"] == "bad_syntax for sm_80: line 1: invalid syntax"
    assert "No module named 'no_such_module'" in said["bad_import"]
    assert said["absent"].endswith("defines no @triton.jit or @gluon.jit function absent")
    assert said["killed"] == "killed for sm_80: the compiler process was killed by SIGKILL"
    assert "was killed by SIGABRT: " in said["crashed"] and "last words" in said["crashed"]


def test_a_slow_kernel_and_an_interrupted_build_end_soon():
    slow = add_job(symbol="slow", source="import time\ntime.sleep(60)\n")
    began = time.monotonic()
    with pytest.raises(BuildError, match="slow for sm_80: compiling took longer than 1.5 s"):
        aot.compile_all([slow], time_limit=1.5)

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        aot.compile_all(
            [add_job(), dataclasses.replace(slow, source=slow.source + "#" * 9000)],
            workers=2,
            progress=interrupt,
        )
    assert time.monotonic() - began < 30


def test_too_much_shared_memory_names_both_numbers():
    jobs = [
        dot_job("sm_89", rows=16, dim=512, num_stages=3, targets=("l4",)),
        dot_job("gfx942", rows=16, keys=16, dim=512, num_stages=8, targets=("mi300x",)),
    ]
    with pytest.raises(BuildError) as caught:
        aot.compile_all(jobs)
    lines = [line for line in str(caught.value).splitlines() if "shared memory" in line]
    assert len(lines) == 2
    for line, job in zip(lines, jobs, strict=True):
        assert line.startswith(f"dots for {job.arch}: needs ") and line.endswith(
            f" are available on {job.targets[0]}"
        )
        needed = int(line.split("needs ")[1].split(" bytes of shared memory per block, ")[0])
        assert needed > job.shared_limit and f"{job.shared_limit} are available" in line


def test_spills_in_a_main_loop_are_refused_and_others_are_not():
    jobs = [
        dot_job("sm_80", dim=128, num_warps=1, options=(("maxnreg", 64),)),
        dot_job("gfx90a", dim=128, num_warps=1, options=(("waves_per_eu", 8),)),
    ]
    with pytest.raises(BuildError) as caught:
        aot.compile_all(jobs)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    for line, job in zip(lines, jobs, strict=True):
        assert line.startswith(f"dots for {job.arch}: spills registers in a main loop: ")
    assert set(caught.value.over) == {("dots", job.arch) for job in jobs}
    binary = Binary(b"", "cubin", "f", 128, 1024, 255, spill_bytes=64, main_loop_spills=0, occupancy=1)
    assert resources.budget_problems(dot_job("sm_90"), binary) == []
    for changes, said in (
        ({"tensor_memory_columns": 513}, "needs 513 columns of tensor memory, 512 are available"),
        ({"scratch_bytes": 128}, "needs 128 bytes of global scratch"),
        ({"occupancy": 0}, "128 threads of 255 registers do not fit"),
    ):
        (reason,) = resources.budget_problems(dot_job("sm_90"), dataclasses.replace(binary, **changes))
        assert reason.startswith(said)


SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;       /* 0x00000a00ff017b82 */
        /*0010*/                   STL.64 [R1+0x8], R2 ;
        /*0020*/                   STL [R1], R4 ;
        /*0030*/                   ISETP.GE.AND P0, PT, R0, UR4, PT ;
        /*0040*/               @P0 BRA 0xd0 ;
        /*0050*/                   IADD3 R0, R0, 0x1, RZ ;
        /*0060*/                   BRA 0x{cold} ;
        /*0070*/                   HMMA.16816.F32.BF16 R52, R40, R28.reuse, RZ ;
        /*0080*/              @!P1 BRA 0x50 ;
        /*0090*/                   LDL.128 R8, [R1+0x10] ;
        /*00a0*/                   BRA 0x30 ;
        /*00b0*/                   LDL.S16 R8, [R1] ;
        /*00c0*/                   BRA 0x70 ;
        /*00d0*/                   EXIT ;
        /*00e0*/                   BRA 0xe0;
"""


def test_main_loops_of_nvidia_machine_code():
    # Work items (0x30 to 0xa0) around a key loop (0x50 to 0x80) which has a cold block at 0xb0, or has not.
    with_cold = loops.parse_sass(SASS.format(cold="b0"))
    assert loops.spill_bytes(with_cold) == 12
    assert loops.main_loops(with_cold) == [frozenset({5, 6, 7, 8, 11, 12})]
    assert loops.main_loop_spill_bytes(with_cold) == 2
    without = loops.parse_sass(SASS.format(cold="70"))
    assert loops.main_loops(without) == [frozenset({5, 6, 7, 8})]
    assert loops.main_loop_spill_bytes(without) == 0
    indirect = loops.parse_sass(SASS.format(cold="70").replace("@P0 BRA 0xd0", "@P0 BRX R2 -0x50"))
    assert (
        loops.main_loop_spill_bytes(indirect) == 18
    )  # a second way into the inner loop: the outer one is taken
    copying = loops.parse_sass(SASS.format(cold="70").replace("HMMA.16816.F32.BF16", "LDG.E"))
    assert frozenset({5, 6, 7, 8}) in loops.main_loops(copying)


def test_main_loops_of_amd_assembly():
    listing = """
kernel:                                 ; @kernel
; %bb.0:
	scratch_store_dword off, v1, off        ; 4-byte Folded Spill
	v_writelane_b32 v2, s3, 1               ; 4-byte Folded Spill
	buffer_store_dwordx4 v[0:3], v4, s[0:3], 0 offen
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
	v_mfma_f32_32x32x8_bf16 v[18:33], v[34:35], v[102:103], 0
	buffer_load_dword v1, off, s[0:3], 0 offset:8 ; 4-byte Folded Reload
	scratch_load_dwordx2 v[2:3], off, off
	s_cbranch_scc0 .LBB0_1
; %bb.2:
	s_endpgm
.Lfunc_end0:
	scratch_store_dword off, v1, off
"""
    instructions = loops.parse_amdgcn(listing)
    assert loops.spill_bytes(instructions) == 4
    assert loops.main_loop_spill_bytes(instructions) == 12
    assert loops.main_loops([]) == []


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "columns", "blocks"),
    [
        ("sm_90", 128, 72, 16384, 0, 7),  # registers: 65536 / (72 * 128)
        ("sm_90", 128, 32, 113 * 1024, 0, 2),  # shared: 228 KB / (113 + 1)
        ("sm_90", 32, 16, 0, 0, 32),  # block slots
        ("sm_80", 256, 32, 0, 0, 8),  # 64 warps
        ("sm_89", 256, 32, 0, 0, 6),  # 48 warps
        ("sm_90", 1024, 128, 0, 0, 0),
        ("sm_100", 128, 64, 0, 256, 2),  # tensor memory: 512 columns
        ("gfx942", 256, 139, 8192, 0, 3),  # registers: 512 / 144 wavefronts a SIMD
        ("gfx942", 64, 32, 0, 0, 32),
        ("gfx942", 256, 64, 65536, 0, 1),
        ("gfx950", 256, 64, 65536, 0, 2),
    ],
)
def test_occupancy(arch, threads, registers, shared, columns, blocks):
    assert blocks == resources.occupancy(
        arch, num_threads=threads, registers=registers, shared_bytes=shared, tensor_memory_columns=columns
    )


def test_unreadable_binaries_are_build_errors(everywhere):
    for data in (b"", b"\x7fELF\x02\x01", everywhere["dots", "gfx942"].data[:3000]):
        with pytest.raises(BuildError, match="metadata of the code object of dots cannot be read"):
            resources.read_hsaco(data, "dots", "")
    with pytest.raises(BuildError, match="cuobjdump"):
        resources.read_cubin(b"not a cubin", "dots")
    with pytest.raises(BuildError, match="does not list other"):
        resources.read_cubin(everywhere["dots", "sm_90"].data, "other")


# The cache


def test_a_cached_build_starts_no_worker(tmp_path, monkeypatch):
    cache = Cache(tmp_path)
    first = aot.compile_all([add_job()], cache=cache)
    monkeypatch.setattr(aot, "Child", None)
    calls = []
    assert (
        aot.compile_all([add_job(targets=("x",))], cache=cache, progress=lambda *c: calls.append(c)) == first
    )
    assert calls == [(1, 1, "add", "sm_80")]
    with pytest.raises(BuildError, match="bytes of shared memory"):
        aot.compile_all([add_job(shared_limit=-1)], cache=cache)


def test_keys_are_content(monkeypatch):
    job = add_job(options=(("maxnreg", 64), ("enable_fp_fusion", False)))
    key = aot.job_key(job)
    same = {"shared_limit": 1, "targets": ("h200",), "options": tuple(reversed(job.options))}
    assert all(aot.job_key(dataclasses.replace(job, **{name: value})) == key for name, value in same.items())
    other = {
        "symbol": "sub",
        "arch": "sm_90",
        "source": ADD + "\n",
        "signature": ADD_SIGNATURE[::-1],
        "divisibility": (),
        "num_warps": 8,
        "num_stages": 1,
        "options": (),
    }
    keys = {aot.job_key(dataclasses.replace(job, **{name: value})) for name, value in other.items()}
    assert len(keys) == len(other) and key not in keys
    monkeypatch.setattr(aot, "toolchain_digest", lambda: "another Triton")
    assert aot.job_key(job) != key
    assert len(toolchain_digest()) == 64


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "renamed", "folder"])
def test_damaged_entries_are_absent_and_replaced(tmp_path, damage):
    cache = Cache(tmp_path)
    key = cache_key({"a": 1})
    cache.put(key, {"n": 1}, b"data" * 100)
    assert cache.get(key) == ({"n": 1}, b"data" * 100)
    path = cache.path(key)
    content = path.read_bytes()
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "truncated":
        path.write_bytes(content[:-7])
    elif damage == "flipped":
        for at in range(0, len(content), 11):
            path.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
            assert cache.get(key) is None
    elif damage == "renamed":
        cache.put(cache_key({"a": 2}), {}, b"other")
        os.replace(cache.path(cache_key({"a": 2})), path)
    else:
        path.unlink()
        path.mkdir()
    assert cache.get(key) is None
    if damage != "folder":
        cache.put(key, {"n": 2}, b"new")
        assert cache.get(key) == ({"n": 2}, b"new")


def test_an_unwritable_cache_only_loses_caching(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    said = []
    cache = Cache(tmp_path / "file" / "cache", warn=said.append)
    assert aot.compile_all([add_job(), add_job("sm_90")], cache=cache)
    assert len(said) == 1 and "cannot be written (Not a directory)" in said[0]


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def unknown(self):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", unknown)
    monkeypatch.delenv("SPECGEN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(
        SpecgenError, match=r"no cache folder: ~/.cache/specgen needs .* set \$HOME or \$SPECGEN_CACHE"
    ):
        Cache()


def test_a_read_only_cache_is_read(tmp_path, monkeypatch):
    key = cache_key({})
    Cache(tmp_path).put(key, {}, b"kept")
    said = []

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)  # tests may run as root, whom modes do not stop
    cache = Cache(tmp_path, warn=said.append)
    assert cache.get(key) == ({}, b"kept")
    with cache.claim(key) as mine:
        assert mine
    cache.put(key, {}, b"other")
    assert cache.get(key) == ({}, b"kept") and len(said) == 1


def test_claims_exclude_and_end(tmp_path):
    one, two = Cache(tmp_path), Cache(tmp_path)
    key = cache_key({})
    with one.claim(key) as first, two.claim(key) as second:
        assert first and not second
    with two.claim(key) as again:
        assert again


BUILDER = """
import sys
from pathlib import Path
sys.path[:0] = [{root!r}, {tests!r}]
from test_aot import add_job, dot_job
from specgen.aot import compile_all
from specgen.cache import Cache
jobs = [add_job("sm_80"), dot_job("sm_80"), add_job("gfx942")]
built = compile_all(jobs, workers=1, cache=Cache(Path({cache!r})))
print([binary.sha256 for binary in built.values()])
"""


def test_many_processes_one_killed_make_one_artifact(tmp_path):
    tests = Path(__file__).parent
    program = BUILDER.format(root=str(tests.parent), tests=str(tests), cache=str(tmp_path))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        for _ in range(8)
    ]
    deadline = time.monotonic() + 60
    while not any(tmp_path.rglob("*.bin")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(processes[0].pid, signal.SIGKILL)
    outputs = {process.communicate(timeout=120)[0] for process in processes[1:]}
    assert [process.returncode for process in processes[1:]] == [0] * 7
    assert len(outputs) == 1
    entries = list(tmp_path.rglob("*.bin"))
    assert len(entries) == 3
    assert all(Cache(tmp_path).get(entry.stem) for entry in entries)


def test_litter_of_killed_processes_is_removed(tmp_path):
    cache = Cache(tmp_path)
    key = cache_key({})
    cache.put(key, {}, b"")
    old, young = cache.path(key).with_name(".old.tmp"), cache.path(key).with_name(".young.tmp")
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    cache.put(key, {}, b"")
    assert not old.exists() and young.exists()
