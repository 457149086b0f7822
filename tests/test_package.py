"""What the public functions launch: rows, argument order, guards, workspaces, capture rules."""

import copy
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
from fake_package import (
    PAGE,
    QK,
    SPEC,
    V,
    append,
    batch,
    build,
    expected,
    fake,
    kv,
    launched,
    misaligned,
    padded,
    states,
)

from specgen.runtime import plans, reference
from specgen.runtime import workspace as workspaces
from specgen.runtime.checks import odd_cache
from specgen.runtime.errors import ArgumentError, CaptureError, NoBinaryError
from specgen.runtime.package import Package


@pytest.fixture
def package(tmp_path):
    return fake(tmp_path)


def test_decode_row(package):
    tensors, keywords = batch()
    out, lse = package.attention(*tensors, **keywords, max_seqlen_q=2, return_lse=True)
    want, want_lse = expected(tensors, keywords)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    assert [launch[0] for launch in launched(package)] == ["decode_global_8_2_a"]
    assert launched(package)[0][1:3] == (6, 0)


def test_mixed_row_launches_decode_then_prefill(package):
    tensors, keywords = batch([(9, 20), (1, 7), (3, 3), (5, 5)])
    out = package.attention(*tensors, **keywords, checks="full")
    torch.testing.assert_close(out.double(), expected(tensors, keywords)[0], rtol=1e-5, atol=1e-5)
    assert [launch[0] for launch in launched(package)] == ["decode_global_8_2_a", "prefill_global_8_2_a"]


@pytest.mark.parametrize("bound, symbols", [(1, 1), (SPEC, 1), (SPEC + 1, 2), (None, 2), (10**9, 2)])
def test_row_follows_the_bound(package, bound, symbols):
    tensors, keywords = batch([(1, 9)] * 6)
    package.attention(*tensors, **keywords, max_seqlen_q=bound)
    assert len(launched(package)) == symbols


def test_row_bound_is_never_more_than_tokens(package):
    tensors, keywords = batch([(1, 9)] * SPEC)
    package.attention(*tensors, **keywords, max_seqlen_q=60)
    assert len(launched(package)) == 1


def test_degree_is_read_from_the_heads(package):
    tensors, keywords = batch(heads=(4, 1))
    package.attention(*tensors, **keywords, max_seqlen_q=2)
    assert launched(package)[0][0] == "decode_global_4_1_a"


def test_argument_order_and_values(package):
    tensors, keywords = batch([(6, 8), (1, 3)])
    scratch = package.workspace("cpu")
    out = torch.empty(9, 10, V)[1:8, 1:9]
    package.attention(*tensors, **keywords, out=out, workspace=scratch)
    q, k, v = tensors
    for symbol, _, _, a in launched(package):
        assert a["q_ptr"] is q and a["k_cache_ptr"] is k and a["v_cache_ptr"] is v and a["out_ptr"] is out
        assert all(a[name + "_ptr"] is tensor for name, tensor in keywords.items())
        assert (a["num_seqs"], a["max_pages"], a["store_lse"], a["block_table_stride"]) == (2, 8, 0, 8)
        assert a["lse_ptr"] is scratch.partial_ml
        assert (a["q_stride_token"], a["q_stride_head"]) == q.stride()[:2]
        assert (a["k_cache_stride_page"], a["k_cache_stride_slot"], a["k_cache_stride_head"]) == k.stride()[
            :3
        ]
        assert (a["v_cache_stride_page"], a["v_cache_stride_slot"], a["v_cache_stride_head"]) == v.stride()[
            :3
        ]
        assert (a["out_stride_token"], a["out_stride_head"]) == (10 * V, V)
    decode = launched(package)[1][3]
    assert decode["partial_acc_ptr"] is scratch.partial_acc and decode["counters_ptr"] is scratch.counters
    assert decode["partial_ml_ptr"] is scratch.partial_ml


def test_contiguous_strides_of_an_allocated_out(package):
    tensors, keywords = batch()
    out = package.attention(*tensors, **keywords)
    assert out.is_contiguous() and out.shape == (4, 8, V)
    assert launched(package)[0][3]["out_stride_token"] == 8 * V


def test_checks_none_passes_the_same_arguments(package):
    tensors, keywords = batch()
    for checks in ("shapes", "none"):
        package.attention(*tensors, **keywords, out=torch.empty(4, 8, V), checks=checks)
    first, second = (
        [x for x in launch[3].values() if isinstance(x, int)] for launch in launched(package)[::1][:2]
    )
    assert first == second and len(launched(package)) == 2


@pytest.mark.parametrize("change", [misaligned, padded])
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_unaligned_guard(package, change, which):
    tensors, keywords = batch()
    out = torch.empty(4, 8, V)
    given = [*tensors, out]
    given[which] = change(given[which])
    package.attention(*given[:3], **keywords, max_seqlen_q=2, out=given[3])
    assert launched(package)[0][0] == "decode_global_8_2_u"
    package.attention(*tensors, **keywords, max_seqlen_q=2, out=out)
    assert launched(package)[1][0] == "decode_global_8_2_a"
    torch.testing.assert_close(given[3], out)


def test_interleaved_caches_and_sliced_queries_are_aligned(package):
    tensors, keywords = batch()
    q = torch.randn(4, 12, QK)
    pool = torch.randn(16, 2, PAGE, 2, QK)
    package.attention(q[:, :8], pool[:, 0], pool[:, 1, :, :, :V], **keywords, max_seqlen_q=2)
    assert launched(package)[0][0] == "decode_global_8_2_a"


def test_what_a_cache_may_be_for_kernels_of_aligned_tensors():
    """Rows and columns of a matrix are 32 bits; a pool with the heads outermost can pass them."""
    eight = SimpleNamespace(kv_heads=8)
    assert not odd_cache(eight, 16 * 8 * 128, 8 * 128, 128)
    assert odd_cache(eight, 16 * 8 * 128 + 8, 8 * 128, 128) and odd_cache(eight, 1024, 0, 128)
    farthest = (2**31 - 1) // 7
    assert not odd_cache(eight, 16 * 128, 128, farthest) and odd_cache(eight, 16 * 128, 128, farthest + 1)
    assert not odd_cache(SimpleNamespace(kv_heads=1), 16 * 128, 128, 1 << 40)


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("checks", ["shapes", "none"])
def test_pages_between_slots_are_unaligned(package, which, checks):
    """A kernel may count the stride of pages in slots."""
    tensors, keywords = batch()
    given = list(tensors)
    pages, size = len(given[which]), given[which][0].numel()
    apart = torch.zeros(pages, size + 4)[:, :size].view(given[which].shape)
    given[which] = apart.copy_(given[which])
    out = package.attention(*given, **keywords, max_seqlen_q=2, checks=checks)
    assert launched(package)[0][0] == "decode_global_8_2_u"
    assert "pages a multiple of" in str(package.explain(*given, **keywords))
    torch.testing.assert_close(out, package.attention(*tensors, **keywords, max_seqlen_q=2))


def test_nothing_to_launch(package):
    tensors, keywords = batch([(0, 3), (0, 0)])
    assert package.attention(*tensors, **keywords).shape == (0, 8, V)
    tensors, keywords = batch()
    out = torch.full((4, 8, V), 7.0)
    assert package.attention(*tensors, **keywords, max_seqlen_q=0, out=out) is out
    empty = {"block_table": keywords["block_table"][:0], "seq_lens": keywords["seq_lens"][:0]}
    package.attention(
        *tensors, **empty, cu_seqlens_q=torch.zeros(1, dtype=torch.int32), out=out, checks="full"
    )
    _, lse = package.attention(
        *batch([])[0], **empty, cu_seqlens_q=torch.zeros(1, dtype=torch.int32), return_lse=True
    )
    assert lse.shape == (0, 8) and (out == 7).all() and not launched(package)


def test_several_layers(tmp_path):
    package = fake(tmp_path, layers=("global", "local"))
    tensors, keywords = batch(heads=(6, 3))
    package.attention(*tensors, **keywords, layer="local", max_seqlen_q=2)
    assert launched(package)[0][0] == "decode_local_6_3_a"
    for call, parts in (
        ({}, ["layer is None", "several layers", "'global', 'local'"]),
        ({"layer": "nope"}, ["layer is 'nope'", "'global', 'local'"]),
        ({"layer": "global"}, ["6 heads", "3 kv heads", "8/2 (tensor_parallel 1), 4/1 (tensor_parallel 2)"]),
    ):
        with pytest.raises(ArgumentError) as error:
            package.attention(*tensors, **keywords, **call)
        assert all(part in str(error.value) for part in parts), error.value
        with pytest.raises(ArgumentError, match="append_kv: "):
            package.append_kv(torch.zeros(1, 3, QK), None, *tensors[1:], slot_mapping=None, **call)


def test_grad_is_fine_without_grad_mode(package):
    tensors, keywords = batch()
    tensors[0] = torch.nn.Parameter(tensors[0])
    with torch.no_grad():
        package.attention(*tensors, **keywords)
    with torch.inference_mode():
        package.attention(*tensors, **keywords)
    assert len(launched(package)) == 2
    with pytest.raises(ArgumentError, match="q requires grad"):
        package.attention(*tensors, **keywords)


def test_transposed_out_is_not_overlapping(package):
    tensors, keywords = batch()
    out = torch.empty(8, 4, V).transpose(0, 1)
    package.attention(*tensors, **keywords, out=out)
    torch.testing.assert_close(out, package.attention(*tensors, **keywords))


def test_append_kv(package):
    given = kv()
    assert append(package, given) is None
    symbol, grid, stream, a = launched(package)[0]
    assert (symbol, grid, stream, a["num_tokens"], a["num_slots"]) == ("append_global_8_2_a", 6, 0, 5, 64)
    assert (a["k_cache_stride_page"], a["k_cache_stride_slot"], a["k_cache_stride_head"]) == given[
        "k_cache"
    ].stride()[:3]
    assert (a["v_stride_token"], a["v_stride_head"]) == given["v"].stride()[:2]
    torch.testing.assert_close(given["k_cache"][0, 3], given["k"][0])
    torch.testing.assert_close(given["v_cache"][15, 3], given["v"][2])
    append(package, given | {"k": misaligned(given["k"])})
    assert launched(package)[1][0] == "append_global_8_2_u"
    append(package, kv(0))
    assert len(launched(package)) == 2


def test_merge_states(package):
    given = states()
    given[1][0] = given[3][0] = -torch.inf
    out, lse = package.merge_states(*given)
    want, want_lse = reference.merge_states(*given)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    assert launched(package)[0][0] == "merge_8" and launched(package)[0][3]["num_rows"] == 24
    package.merge_states(misaligned(given[0]), *given[1:])
    assert launched(package)[1][3]["out_a_ptr"].data_ptr() % 16 == 0
    assert package.merge_states(*states(0))[0].shape == (0, 8, V)


def test_workspace_is_of_published_size_and_belongs(package, tmp_path):
    scratch = package.workspace("cpu", max_seqs=2, max_tokens=3)
    assert scratch.nbytes == 4 * (2 * 6 * 16 * 16 + 2 * 6 * 2 * 16 + 6 + 2 + 1) == package.workspace("cpu").nbytes
    scratch.counters.fill_(3)
    scratch.tickets.fill_(3)
    scratch.reset()
    assert (
        not scratch.counters.any()
        and not scratch.tickets.any()
        and scratch.partial_acc.dtype == torch.float32
        and scratch.counters.dtype == torch.int32
    )
    tensors, keywords = batch([(1, 3), (2, 3)])
    package.attention(*tensors, **keywords, workspace=scratch)
    for lens, part in (([(1, 3)] * 3, "max_seqs 2; needed: 3"), ([(2, 3)] * 2, "max_tokens 3; needed: 4")):
        tensors, keywords = batch(lens)
        with pytest.raises(ArgumentError, match=part):
            package.attention(*tensors, **keywords, workspace=scratch)
    other = fake(tmp_path, name="other_kernels")
    refusal = "workspace is of another package, fake_kernels; needed: one that other_kernels.workspace"
    with pytest.raises(ArgumentError, match=refusal):
        other.attention(*tensors, **keywords, workspace=scratch)
    other_class = type("Workspace", (), {"owner": package})  # of another package's runtime
    with pytest.raises(ArgumentError, match=refusal):
        other.attention(*tensors, **keywords, workspace=other_class())


@pytest.mark.parametrize(
    "limits, part",
    [
        ({"max_seqs": 9}, "max_seqs is 9; needed: 1 to 8"),
        ({"max_seqs": 0}, "max_seqs is 0"),
        ({"rows": 1}, "rows is no limit; needed: one of max_seqs"),
        ({"max_tokens": True}, "max_tokens is bool"),
        ({"max_tokens": 1.0}, "max_tokens is float"),
    ],
)
def test_wrong_workspace_limits(package, limits, part):
    with pytest.raises(ArgumentError, match=part):
        package.workspace("cpu", **limits)


def test_one_workspace_per_stream(package):
    tensors, keywords = batch()
    package.attention(*tensors, **keywords)
    served = package._devices[torch.device("cpu")]
    seen = []
    for stream in (0, 7, 0, 9, 7):
        served.current_stream = lambda index, stream=stream: stream
        package.attention(*tensors, **keywords)
        seen.append((launched(package)[-1][2], launched(package)[-1][3]["counters_ptr"].data_ptr()))
    assert [stream for stream, _ in seen] == [0, 7, 0, 9, 7]
    assert seen[0] == seen[2] and seen[1] == seen[4] and len(set(seen)) == 3


def test_capture_takes_the_spare_and_calls_outside_renew_it(package, monkeypatch):
    capturing = False
    monkeypatch.setattr(workspaces, "is_capturing", lambda device: capturing)
    package.warmup("cpu")
    tensors, keywords = batch()
    served = package._devices[torch.device("cpu")]

    def call(stream):
        served.current_stream = lambda index: stream
        package.attention(*tensors, **keywords)
        return launched(package)[-1][3]["counters_ptr"]

    eager = call(0)
    capturing = True
    captured = call(5)
    assert captured is not eager and call(5) is captured
    before = len(launched(package))
    with pytest.raises(CaptureError, match=r"needed: call warmup\(\) before the capture"):
        call(6)
    assert len(launched(package)) == before
    capturing = False
    assert call(0) is eager
    capturing = True
    assert call(6) is not captured
    assert call(0) is eager


def test_first_call_inside_capture(package, monkeypatch):
    """Without warmup a named error and no launch; after it the call works."""
    capturing = True
    monkeypatch.setattr(workspaces, "is_capturing", lambda device: capturing)
    monkeypatch.setattr("specgen.runtime.package.is_capturing", lambda device: capturing)
    tensors, keywords = batch()
    package._plans("cpu", "warmup")
    package.opened[0].refuse = True
    with pytest.raises(CaptureError, match="warmup"):
        package.attention(*tensors, **keywords)
    for call in (package.warmup, package.workspace):
        with pytest.raises(CaptureError, match="being captured"):
            call("cpu")
    assert not launched(package)
    capturing, package.opened[0].refuse = False, False
    package.warmup("cpu")
    capturing, package.opened[0].refuse = True, True
    served = package._devices[torch.device("cpu")]
    served.current_stream = lambda index: 3
    package.attention(*tensors, **keywords)
    assert len(launched(package)) == 1


def test_a_workspace_made_in_inference_mode_can_be_reset_outside(package):
    with torch.inference_mode():
        scratch = package.workspace("cpu")
    scratch.reset()


def test_warmup_loads_everything(package):
    package.warmup("cpu")
    assert set(package.opened[0].loaded) >= set(package.manifest["variants"]) and len(package.opened) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu(package, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for call in (package.warmup, package.workspace):
        with pytest.raises(NoBinaryError, match="no CUDA or HIP device.*sm_90"):
            call()
        with pytest.raises(NoBinaryError, match="no CUDA or HIP device.*sm_90"):
            call("cuda:0")
        for device in ("nonsense", 1.5, []):
            with pytest.raises(ArgumentError, match="(warmup|workspace): device is .*; needed: a torch.device or its name"):
                call(device)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    package.warmup()
    assert str(package.workspace().device) == "cpu"


def test_argument_errors_come_before_the_device(tmp_path):
    directory, *rows = build(tmp_path)

    def open_device(*_):
        raise NoBinaryError("nothing fits")

    package = Package("closed_kernels", directory, *rows, open_device=open_device)
    tensors, keywords = batch()
    with pytest.raises(ArgumentError, match="q has dtype"):
        package.attention(tensors[0].half(), *tensors[1:], **keywords)
    with pytest.raises(NoBinaryError):
        package.attention(*tensors, **keywords)
    text = str(package.explain(*tensors, **keywords))
    assert "nothing fits" in text and "cannot run" in text and "shown for h200" in text


def test_plan_of_a_stream_reader_needs_no_gpu():
    assert plans._stream_reader(torch.device("cpu"))(-1) == 0


def test_copies_and_pickles_are_the_package(package, monkeypatch):
    """A module that holds k.attention and a workspace can be copied, and sent to a process of its own."""
    monkeypatch.setitem(sys.modules, package.name, SimpleNamespace(_package=package))
    tensors, keywords = batch()
    package.attention(*tensors, **keywords)  # a device is open: it holds locks
    scratch = package.workspace("cpu")
    for again in (copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        assert again(package) is package
        assert again(package.attention).__self__ is package
        copied = again(scratch)
        assert copied is not scratch and copied.nbytes == scratch.nbytes
        package.attention(*tensors, **keywords, workspace=copied)


def freed(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def test_a_tensor_without_memory_is_refused(package):
    (q, k_cache, v_cache), keywords = batch()

    def attention(q=q, k_cache=k_cache):
        return package.attention(q, k_cache, v_cache, **keywords)

    for call, name in (
        (lambda: torch.vmap(attention)(q[None]), "attention: q"),
        (lambda: torch.vmap(lambda cache: attention(k_cache=cache))(k_cache[None]), "attention: k_cache"),
        (lambda: torch.func.jvp(attention, (q,), (q,)), "attention: q"),
        (lambda: torch.func.functionalize(attention)(q), "attention: q"),
        (lambda: attention(k_cache=freed(k_cache)), "attention: k_cache"),
    ):
        with pytest.raises(ArgumentError, match=f"^{name} has no memory: .*; needed: a plain tensor"):
            call()
    k, v = (cache[0, :3].clone() for cache in (k_cache, v_cache))
    for name in ("block_table", "seq_lens", "cu_seqlens_q"):
        with pytest.raises(ArgumentError, match=f"^attention: {name} has no memory"):
            package.attention(q, k_cache, v_cache, **keywords | {name: freed(keywords[name])})
    with pytest.raises(ArgumentError, match="^append_kv: v_cache has no memory"):
        package.append_kv(k, v, k_cache, freed(v_cache), slot_mapping=torch.arange(3))
    out_a, lse_a, out_b, lse_b = states()
    with pytest.raises(ArgumentError, match="^merge_states: out_b has no memory"):
        package.merge_states(out_a, lse_a, freed(out_b), lse_b)
    assert launched(package) == []


def test_a_cache_without_pages_serves_sequences_without_keys(package):
    (q, k_cache, v_cache), keywords = batch()
    keywords["seq_lens"] = torch.zeros_like(keywords["seq_lens"])
    assert not package.attention(q, k_cache[:0], v_cache[:0], **keywords).any()


def test_return_lse_is_a_bool(package):
    tensors, keywords = batch()
    for value in (torch.tensor(True), 1, None):
        with pytest.raises(ArgumentError, match="return_lse is .*; needed: True or False"):
            package.attention(*tensors, **keywords, return_lse=value)
    assert launched(package) == []


def test_nested_tensors_are_refused_by_name(package):
    (q, k_cache, v_cache), keywords = batch()
    nested = torch.nested.nested_tensor([q[:1], q[1:]], layout=torch.jagged)
    with pytest.raises(
        ArgumentError, match="attention: q is a nested tensor; needed: a dense strided tensor"
    ):
        package.attention(nested, k_cache, v_cache, **keywords)
