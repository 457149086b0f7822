"""The custom operators: opcheck, torch.compile(fullgraph=True), export, fake tensors, reloads."""

import copy
import gc
import importlib.util
import sys

import pytest
import torch
from fake_package import PAGE, QK, V, batch, fake, kv, launched, states

from specgen.runtime import operators
from specgen.runtime.errors import ArgumentError


@pytest.fixture
def package(tmp_path):
    return fake(tmp_path)


def op_arguments(tensors, keywords):
    return (*tensors, *keywords.values())


@pytest.mark.parametrize("name", ["attention", "attention_lse", "attention_out", "attention_out_lse"])
def test_opcheck_attention(package, name):
    tensors, keywords = batch([(6, 9), (1, 5)])
    given = op_arguments(tensors, keywords)
    given += (torch.zeros(7, 8, V),) if "out" in name else ()
    torch.library.opcheck(
        getattr(torch.ops.fake_kernels, name).default, given, {"max_seqlen_q": 6, "layer": "global"}
    )


def test_opcheck_the_others(package):
    given = kv()
    given["slot_mapping"] = torch.tensor([3, -1, 9, 12, 0])
    torch.library.opcheck(torch.ops.fake_kernels.append_kv.default, tuple(given.values()))
    torch.library.opcheck(torch.ops.fake_kernels.merge_states.default, tuple(states()))


def test_operators_refuse_as_the_functions_do(package):
    tensors, keywords = batch()
    with pytest.raises(ArgumentError, match="q has dtype"):
        torch.ops.fake_kernels.attention(tensors[0].half(), *tensors[1:], *keywords.values())
    with pytest.raises(ArgumentError, match="q requires grad"):
        torch.ops.fake_kernels.attention(tensors[0].requires_grad_(), *tensors[1:], *keywords.values())


class Step(torch.nn.Module):
    """Append, attend, merge: one layer's use of a package."""

    def __init__(self, package, use_out=False):
        super().__init__()
        self.package, self.use_out = package, use_out

    def forward(self, q, k, v, k_cache, v_cache, slot_mapping, block_table, seq_lens, cu_seqlens_q):
        self.package.append_kv(k, v, k_cache, v_cache, slot_mapping=slot_mapping)
        out = torch.zeros(q.shape[0], q.shape[1], V) if self.use_out else None
        paged = {"block_table": block_table, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}
        out, lse = self.package.attention(
            q * 1.0, k_cache, v_cache, **paged, out=out, return_lse=True, max_seqlen_q=q.shape[0]
        )
        return self.package.merge_states(out, lse, out, lse)[0] + self.package.attention(
            q, k_cache, v_cache, **paged
        )


def step_arguments(tokens=5, interleaved=True):
    tensors, keywords = batch([(tokens - 1, 9), (1, 5)])
    k, v = torch.randn(tokens, 2, QK), torch.randn(tokens, 2, V)
    if interleaved:
        pool = torch.zeros(16, 2, PAGE, 2, QK)
        caches = pool[:, 0], pool[:, 1, :, :, :V]
    else:
        caches = torch.zeros(16, PAGE, 2, QK), torch.zeros(16, PAGE, 2, V)
    keywords["block_table"] = torch.arange(16, dtype=torch.int32).view(2, 8)
    return [tensors[0], k, v, *caches, torch.arange(tokens), *keywords.values()]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("use_out", [True, False])
def test_compile_fullgraph(package, use_out, interleaved):
    step = Step(package, use_out)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for tokens in (5, 7, 3):
            mine, theirs = step_arguments(tokens, interleaved), step_arguments(tokens, interleaved)
            for place in (1, 2):
                theirs[place] = mine[place].clone()
            torch.testing.assert_close(compiled(*mine), step(*theirs))
            torch.testing.assert_close(mine[3], theirs[3])
            torch.testing.assert_close(mine[4], theirs[4])


def test_compile_of_a_module_level_function(package):
    """As the generated __init__ has them: bound methods of one Package."""
    attention = package.attention
    tensors, keywords = batch()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, k_cache, v_cache, paged):
        return attention(q, k_cache, v_cache, **paged, max_seqlen_q=2, layer="global") * 2

    torch.testing.assert_close(step(*tensors, keywords), attention(*tensors, **keywords) * 2)


def test_compile_refuses_a_workspace(package):
    tensors, keywords = batch()
    scratch = package.workspace("cpu")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, k_cache, v_cache, paged):
        return package.attention(q, k_cache, v_cache, **paged, workspace=scratch)

    with pytest.raises(Exception, match="workspace"):
        step(*tensors, keywords)


@pytest.mark.parametrize("strict", [True, False])
def test_export(package, strict):
    step = Step(package).eval()
    with torch.no_grad():
        given = step_arguments()
        program = torch.export.export(step, tuple(copy.deepcopy(given)), strict=strict)
        names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert any(name.startswith("fake_kernels.attention_lse") for name in names)
        torch.testing.assert_close(program.module()(*copy.deepcopy(given)), step(*given))


def test_fake_tensors_give_shapes_and_launch_nothing(package):
    tensors, keywords = batch()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        q, k_cache, v_cache = map(mode.from_tensor, tensors)
        out, lse = package.attention(q, k_cache, v_cache, **keywords, return_lse=True)
        assert out.shape == (4, 8, V) and lse.shape == (4, 8) and lse.dtype == torch.float32
    assert not package.opened


def test_two_packages_and_a_reload(tmp_path):
    """Operators live in a namespace per package; a reload serves the new object, registers none twice."""
    first, second = fake(tmp_path, name="first_kernels"), fake(tmp_path, name="second_kernels")
    tensors, keywords = batch()
    torch.ops.first_kernels.attention(*op_arguments(tensors, keywords))
    assert first.opened and not second.opened
    again = fake(tmp_path, name="first_kernels")
    del first
    gc.collect()
    torch.ops.first_kernels.attention(*op_arguments(tensors, keywords))
    torch.ops.second_kernels.attention(*op_arguments(tensors, keywords))
    assert again.opened and second.opened


def test_a_reloaded_operators_module_serves_too(package, tmp_path):
    spec = importlib.util.spec_from_file_location("specgen.runtime.operators_again", operators.__file__)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        module.Operators(package)
    finally:
        del sys.modules[spec.name]
    tensors, keywords = batch()
    torch.ops.fake_kernels.attention(*op_arguments(tensors, keywords))
    assert launched(package)
