"""`specgen bench` without a GPU: fake contenders and timers, both tracks over a fake package, the command."""

import itertools
import json
import sys
from types import ModuleType

import pytest
import torch
from fake_package import build, fake

from specgen import cli
from specgen.bench import contest as contests
from specgen.bench import peers as all_peers
from specgen.bench import run, timing, vllm_triton
from specgen.bench.batch import Batch
from specgen.bench.contest import Attention, DeviceLost, contest
from specgen.bench.peers import PEERS, Peer, Run, Unavailable, needs, open_peers
from specgen.bench.run import Plan
from specgen.bench.step import Stack
from specgen.bench.workloads import parse
from specgen.errors import SpecgenError

LAYER = {
    "name": "global",
    "query_heads": 8,
    "kv_heads": 2,
    "qk_dim": 32,
    "v_dim": 16,
    "scale": 32**-0.5,
    "mask": "causal",
    "page_size": 4,
    "dtype": "float32",
}
CEILINGS = {"empty": 2, "read": 1002, "copy": 2002, "matmul": 1602}

# Its first call looks at the GPUs: now, before tests pretend that there are some, whichever runs first in a process.
torch.backends.cudnn.version()


class FakeTimer:
    """Says that every call took the microseconds that it returns, or 50."""

    def __init__(self):
        self.now = []

    def enqueue(self, call):
        result = call()
        self.now.append(float(result) if isinstance(result, int) else 50.0 + len(self.now) / 8)

    def collect(self):
        self.now, found = [], self.now
        return found


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """The parts that need a GPU, replaced: captures replay the call, and device times are made up."""
    monkeypatch.setattr(contests, "capture", lambda call: call)
    monkeypatch.setattr(contests, "host_us", lambda call: 7.5)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "ceilings", lambda: {name: lambda us=us: us for name, us in CEILINGS.items()})
    monkeypatch.setattr(timing, "GraphTimer", FakeTimer)
    monkeypatch.setattr(run, "DEVICE", "cpu")
    monkeypatch.setattr(run, "gpu", lambda: "Fake GPU")
    monkeypatch.setattr(run, "software", lambda: {"torch": "2"})


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package over the runtime's fake device."""

    def make(name="fake_kernels", **options):
        made, module = fake(tmp_path, name=name, **options), ModuleType(name)
        directory, rows, *_ = build(tmp_path, name=name, **options)
        module.__file__ = str(directory / "__init__.py")
        for function in ("attention", "append_kv"):
            setattr(module, function, getattr(made, function))
        module.warmup = lambda device: None
        dispatch = ModuleType(f"{name}.dispatch")
        dispatch.ATTENTION_ROWS = rows
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(sys.modules, dispatch.__name__, dispatch)
        return module

    return make


class Fake(Peer):
    """Computes by the reference; `do` may change or refuse that."""

    title, version = "a fake", "1"

    def __init__(self, name, do=lambda out, way: out, ways=("",)):
        self.name, self.do, self.ways = name, do, ways

    def make(self, batch, way=""):
        return Run(lambda: self.do(batch.reference().float(), way))


def refuse(reason):
    def do(out, way):
        raise reason

    return do


def subject(name="dec b2 k9"):
    return Attention(Batch(parse(name), LAYER, "cpu"))


def test_contenders_that_fail_are_noted_and_the_others_go_on():
    contenders = [
        Fake("right"),
        Fake("wrong", lambda out, way: 1.5 * out),
        Fake("silent", lambda out, way: out * float("nan")),
        Fake("raises", refuse(RuntimeError("no kernel\nat all"))),
        Fake("refuses", refuse(Unavailable("has no pages"))),
        Fake(
            "half",
            lambda out, way: out if way == "good" else refuse(ValueError("no"))(out, way),
            ("good", "bad"),
        ),
    ]
    outcome = contest(subject(), contenders, rounds=3, hosted=True, timer=FakeTimer())
    found = outcome.fields()
    assert list(found["times_us"]) == ["right", "half"] and found["host_us"] == {"right": 7.5, "half": 7.5}
    assert found["error"]["right"] < 1e-6
    assert found["notes"] == {
        "wrong": "wrong: relative error 0.5, allowed 2e-05",
        "silent": "wrong: relative error inf, allowed 2e-05",
        "raises": "RuntimeError: no kernel",
        "refuses": "has no pages",
        "half": "bad: ValueError: no",
    }


def test_the_best_way_counts():
    times = {"slow": 9, "fast": 3}
    outcome = contest(subject(), [Fake("peer", ways=("slow", "fast"))], rounds=2, timer=FakeTimer())
    outcome.times = {entry: timing.Samples((times[entry[1]],)) for entry in outcome.times}
    found = outcome.fields()
    assert found["times_us"] == {"peer": 3} and found["ways"] == {"peer": times}


def test_a_lost_gpu_ends_the_run(monkeypatch, package):
    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(DeviceLost, match="raises raised ValueError: x, and the GPU is lost"):
        contest(subject(), [Fake("raises", refuse(ValueError("x")))], rounds=1, timer=FakeTimer())
    module, lines = package(), []
    module.attention = refuse(ValueError("x"))
    result = measured(monkeypatch, lines, rows=("dec b2 k9", "dec b2 k10"), peers=())
    assert result["rows"] == [] and list(result["skipped"]) == [
        "dec b2 k9, 8/2 heads of 32 (v 16), float32, pages of 4"
    ]
    assert "the run ends here" in lines[-1]


def measured(monkeypatch, lines=None, **options):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plan = Plan(**{"packages": ("fake_kernels",), "rounds": 3} | options)
    return run.bench(plan, (lines if lines is not None else []).append)


def test_kernels_track(monkeypatch, package, tmp_path):
    package()
    package("other_kernels")
    file = tmp_path / "fake_kernels" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["dispatch"][0] |= {"measured_on": "h200", "regret": {"held_out": {"workloads": 40}}}
    file.write_text(json.dumps(manifest))
    lines = []
    rows = ("dec b2 k9", "mixed pre b1 20 + dec b2 k33", "dec b9 k4")
    result = measured(
        monkeypatch, lines, packages=("fake_kernels", "other_kernels"), rows=rows, peers=("fa3", "vllm")
    )
    assert [row["workload"] for row in result["rows"]] == list(rows)
    first, second, beyond = result["rows"]
    assert list(first["times_us"]) == ["specgen", "other_kernels"] == list(first["host_us"])
    assert max(*first["error"].values(), *second["error"].values()) < 1e-6
    assert second["host_us"] == {}, "host times of decode rows alone"
    assert beyond["notes"] == dict.fromkeys(first["times_us"], "needs max_seqs 9, the package has 8")
    assert beyond["times_us"] == {} and first["floor_us"] == pytest.approx(
        first["bytes"] / 4.294967e6, abs=1e-3
    )
    assert result["read_GBs"] == pytest.approx(4294.97, rel=1e-4) and result["empty_us"] == 2
    assert result["peers"]["specgen"]["title"] == "fake_kernels" and result["track"] == "kernels"
    tree = {"layer": manifest["layers"][0]["name"], "arch": "sm_90", "measured_on": "h200", "held_out": {"workloads": 40}}
    assert result["regret"] == {"fake_kernels": [tree]}
    assert result["peers"]["fa3"] == {
        "title": "FlashAttention-3",
        "reason": "flash_attn_interface is not installed",
    }
    assert lines[0] == "without fa3: flash_attn_interface is not installed" and lines[-1].startswith(
        "dec b9 k4 [8/2 heads of 32 (v 16)]  "
    )
    json.dumps(result, allow_nan=False)


def test_end_to_end_track(monkeypatch, package):
    package()
    monkeypatch.setattr(run, "open_peers", lambda names: ([Fake("peer"), PEERS["cudnn"]()], {}))
    lines = []
    rows = ("dec b3 ragged k20", "pre b1 20")
    result = measured(monkeypatch, lines, track="end-to-end", layers=3, rows=rows)
    (row,) = result["rows"]
    assert (
        list(row["times_us"]) == ["specgen", "peer", "rest"]
        and row["host_us"] == {}
        and list(row["error"]) == ["specgen", "peer"]
    )
    assert row["error"]["specgen"] < 1e-5
    assert row["notes"] == {"cudnn": "reads a dense cache, to which nothing appends"}
    assert list(result["skipped"].values()) == ["a step is of one token for each sequence"]
    assert result["layers"] == 3
    hidden = 8 * 16
    inner = 512
    weights = 3 * (hidden * (8 * 32 + 2 * 32 + 2 * 16) + hidden * hidden + 3 * hidden * inner)
    attention = parse("dec b3 ragged k20")
    assert row["bytes"] == 4 * weights + 3 * attention.bytes(LAYER)
    assert row["operations"] == 2 * 3 * weights + 3 * attention.operations(LAYER)


def test_a_step_appends_its_keys(package):
    module = all_peers.Package(package(), "specgen")
    stack = Stack(parse("dec b3 ragged k20"), LAYER, "cpu", 2, module)
    before = [batch.k_cache.clone() for batch in stack.batches]
    out = stack.enter(module).call()
    assert out.shape == (3, 8 * 16) and stack.error(out) < 1e-5 and stack.error(out * 2) > 0.5
    for batch, old in zip(stack.batches, before):
        changed = (batch.k_cache != old).flatten(2).any(2).nonzero().tolist()
        last = [keys - 1 for _, keys in batch.workload.seqs]
        places = [[int(row[key // 4]), key % 4] for row, key in zip(batch.block_table, last)]
        assert sorted(changed) == sorted(places)


def test_time_budget(monkeypatch, package):
    package()
    clock = itertools.count(0, 40)
    monkeypatch.setattr(run.time, "monotonic", lambda: next(clock))
    result = measured(monkeypatch, rows=("dec b1 k4", "dec b1 k5", "dec b1 k6"), peers=(), seconds=50)
    assert [row["workload"] for row in result["rows"]] == ["dec b1 k4"]
    assert list(result["skipped"].values()) == ["the time budget of 50 s was over"] * 2


def test_the_time_is_shared_among_the_rows(monkeypatch, package):
    package()
    clock = itertools.count(0, 4)
    monkeypatch.setattr(run.time, "monotonic", lambda: next(clock))
    result = measured(monkeypatch, rows=("dec b1 k4", "dec b1 k5"), peers=(), rounds=30, seconds=100)
    # The first row's share ends at 4 + 96 / 2 and the second's at 60 + 40 / 1; five rounds look at no clock.
    assert [row["rounds"] for row in result["rows"]] == [17, 15] and result["skipped"] == {}


def test_no_host_time_where_the_gpu_hides_it(monkeypatch):
    monkeypatch.setattr(contests, "HOSTED_US", 40)
    outcome = contest(subject(), [Fake("right")], rounds=2, hosted=True, timer=FakeTimer())
    assert outcome.fields()["times_us"] == {"right": 50.0} and outcome.fields()["host_us"] == {}


def test_a_row_that_does_not_fit_is_skipped(monkeypatch, package):
    package()

    def batch(workload, *rest):
        if workload.keys == 5:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return Batch(workload, *rest)

    monkeypatch.setattr(run, "Batch", batch)
    result = measured(monkeypatch, rows=("dec b1 k5", "dec b1 k6"), peers=())
    assert [row["workload"] for row in result["rows"]] == ["dec b1 k6"]
    assert list(result["skipped"].values()) == ["OutOfMemoryError: CUDA out of memory."]


def test_several_geometries(monkeypatch, package):
    package()
    package("two_kernels", layers=("global", "local"))
    groups = run.group(
        Plan(("x",), rows=("dec b1 *",)), [sys.modules[name] for name in ("fake_kernels", "two_kernels")]
    )
    assert [(each.layer["name"], [p.name for p in each.packages]) for each in groups] == [
        ("global", ["specgen", "two_kernels"]),
        ("local", ["specgen"]),
    ]
    assert [package.title for package in groups[1].packages] == ["two_kernels"]
    result = measured(monkeypatch, packages=("fake_kernels", "two_kernels"), rows=("dec b1 k5",), peers=())
    assert result["peers"]["specgen"]["title"] == "fake_kernels, two_kernels"


def test_peers_say_why_they_are_missing(monkeypatch, tmp_path):
    monkeypatch.delenv(vllm_triton.FOLDER, raising=False)
    opened, reasons = open_peers(PEERS)
    assert [peer.name for peer in opened] == ["cudnn", "flash", "flex"]
    assert reasons["flashinfer"] == "flashinfer is not installed"
    assert reasons["vllm"].startswith("vllm is not installed, and $VLLM_OPS names no folder")
    monkeypatch.setenv(vllm_triton.FOLDER, str(tmp_path))
    assert "holds no triton_unified_attention.py" in open_peers(["vllm"])[1]["vllm"]
    (tmp_path / "flash_attn_interface.py").write_text("raise OSError('libcudart.so.12: not found')")
    monkeypatch.syspath_prepend(tmp_path)
    assert (
        open_peers(["fa3"])[1]["fa3"]
        == "flash_attn_interface does not load: OSError: libcudart.so.12: not found"
    )


def test_version_of_a_module_without_metadata(monkeypatch, tmp_path):
    (tmp_path / "flashinfer.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    peer = PEERS["flashinfer"]()
    assert peer.version == "unknown"
    peer.module.__version__ = "0.5.3"
    assert peer.version == "0.5.3"
    del sys.modules["flashinfer"]


def test_the_operator_of_a_folder_is_called_with_the_batch(monkeypatch, tmp_path):
    (tmp_path / "triton_attention_helpers.py").write_text(
        "from vllm.triton_utils import tl, triton\none = 1\n"
    )
    (tmp_path / "triton_unified_attention.py").write_text(
        "import vllm.envs as envs\n"
        "from vllm.logger import init_logger\n"
        "from vllm.platforms import current_platform\n"
        "from vllm.v1.attention.ops.triton_attention_helpers import one\n"
        "from vllm.v1.kv_cache_interface import KVQuantMode\n"
        "logger, fp8 = init_logger(__name__), current_platform.fp8_dtype()\n"
        "assert not current_platform.is_cuda() and not envs.VLLM_BATCH_INVARIANT\n"
        "def unified_attention(**given):\n"
        "    logger.debug_once('called')\n"
        "    given['out'].fill_(given['max_seqlen_k'] + one + KVQuantMode.NONE)\n"
    )
    monkeypatch.setenv(vllm_triton.FOLDER, str(tmp_path))
    peer = PEERS["vllm"]()
    assert peer.version.startswith("file ") and not [
        name for name in sys.modules if name.split(".")[0] == "vllm"
    ]
    batch = Batch(parse("spec b2 q2 k9"), LAYER | {"dtype": "bfloat16", "v_dim": 32}, "cpu")
    out = peer.make(batch).call()
    assert out is batch.out and (out == 10).all()


def test_what_a_peer_does_not_serve():
    assert needs(LAYER) == {"float32", "value heads of another size"}
    plain = LAYER | {"dtype": "bfloat16", "v_dim": 32}
    assert needs(plain) == set()
    assert needs(plain | {"sliding_window": 3, "layout": "HND", "mask": "bidirectional", "sinks": False}) == {
        "sliding window",
        "HND",
        "bidirectional",
    }
    cudnn, flex = PEERS["cudnn"](), PEERS["flex"]()
    for peer, name, layer, reason in (
        (cudnn, "dec b2 k9", plain | {"sinks": True, "softcap": 3.0}, "does not do sinks, softcap"),
        (cudnn, "dec b1 k9 + b1 k8", plain, "sequences of one length alone"),
        (cudnn, "chunk q4 of 9", plain, "SDPA's causal mask begins at the first key"),
        (flex, "dec b2 k9", plain, "measured from 128 query rows on"),
    ):
        with pytest.raises(Unavailable, match=reason):
            peer.make(Batch(parse(name), layer, "cpu"))


@pytest.mark.parametrize("name", ["dec b3 k21", "pre b2 13"])
def test_dense_peers_compute_the_same(monkeypatch, name):
    """Their layout and arguments, with whatever backend this machine has."""
    layer = LAYER | {"dtype": "bfloat16", "v_dim": 32, "layout": "HND"}
    peer, batch = PEERS["cudnn"](), Batch(parse(name), layer, "cpu")
    monkeypatch.setattr(peer, "_only", lambda: torch.inference_mode())
    made = peer.make(batch)
    assert batch.error(made.post(made.call())) < 5e-3


def test_flex_sees_what_the_layer_says(monkeypatch):
    flex = PEERS["flex"]()
    monkeypatch.setattr(flex, "least_rows", 1)
    compile_ = torch.compile  # flex_attention's own use of it stays
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: f if "dynamic" in options else compile_(f, **options)
    )
    layer = LAYER | {"v_dim": 32, "sliding_window": 5, "softcap": 2.0}
    monkeypatch.setattr(type(flex), "serves", flex.serves | {"float32"})
    batch = Batch(parse("chunk b2 q7 of 20"), layer, "cpu")
    made = flex.make(batch)
    assert batch.error(made.post(made.call())) < 1e-5


def test_the_command_says_what_is_wrong(monkeypatch, package, capsys, tmp_path):
    module = package()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "result.json").write_text("{}")
    for arguments, message in (
        ([], "bench: names no package; needs the import name, folder or spec of a built one"),
        (
            ["nowhere_kernels"],
            "nowhere_kernels: does not import (No module named 'nowhere_kernels'); needs an",
        ),
        (["../t"], "bench: ../t is neither a folder nor a name that can be imported; needs the import name"),
        ([str(tmp_path)], f"bench: {tmp_path} is a folder without manifest.json; needs the import name"),
        (["json"], "json: is no package that specgen built; its folder holds no manifest.json"),
        (
            ["fake_kernels", "--peers", "fa3,fa4"],
            "--peers: unknown fa4; known: fa3, flashinfer, cudnn, flash, flex, vllm",
        ),
        (
            ["fake_kernels", "--rows", "dec b1"],
            "'dec b1': not a workload; needs a form such as 'dec b32 k4k'",
        ),
        (["fake_kernels", "--rows", "x*"], "--rows 'x*': no standard row is named so"),
        (
            ["--package", "fake_kernels"],
            "bench: torch sees no GPU here; `specgen bench --report FILE` renders a past run",
        ),
        (
            ["--report", str(tmp_path / "result.json")],
            "result.json: is no result of `specgen bench`: it lacks device",
        ),
        (["--report", str(tmp_path / "none.json")], "none.json: no such file"),
    ):
        assert cli.main(["bench", *arguments]) == 1, arguments
        assert message in capsys.readouterr().err
    assert run.open_package(str(tmp_path / "fake_kernels"), tmp_path) is module
    sys.path.remove(str(tmp_path))
    with pytest.raises(SpecgenError, match="llama_3_1_8b_kernels: no such folder; run `specgen build "):
        run.open_package("specs/llama_3_1_8b.yaml", tmp_path)


def test_the_command_measures_and_writes(monkeypatch, package, capsys, tmp_path):
    package()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    folder = tmp_path / "out"
    rows = [option for keys in (5, 9, 17) for option in ("--rows", f"dec b2 k{keys}")]
    assert cli.main(["bench", "fake_kernels", *rows, "--peers", "", "--rounds", "2", "-o", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "dec b2 k17" in out and f"wrote {folder / 'results.json'}" in out
    result = json.loads((folder / "results.json").read_text())
    assert (
        result["command"].startswith("specgen bench fake_kernels --rows 'dec b2 k5'")
        and result["rounds"] == 2
    )
    assert {path.name for path in folder.iterdir()} == {
        "results.json",
        "README.md",
        "latency.png",
        "roofline.png",
    }
