"""A decode step of a decoder model with random weights: all but attention is the same for everybody.

Touches only the tensors it allocates. Each layer normalises, projects to queries, keys and values, appends to
its own paged cache (with the generated package's append_kv, whoever attends), attends, projects back, and
runs a gated MLP.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from specgen.bench.batch import Batch
from specgen.bench.peers import Dense, Package, Peer, Run, Unavailable
from specgen.bench.results import REST
from specgen.bench.workloads import Workload

MLP = 3.5  # width of the MLP in hidden sizes, as in Llama 3
STEP_OF_WIDTH = 256
ALLOWED = 0.1  # relative error of the hidden state: roundings of every layer before a layer's own


class Reference(Peer):
    """The float64 reference in the place of a kernel: what a step's error is measured against."""

    name, title = "reference", "float64"

    def make(self, batch: Batch, way: str = "") -> Run:
        """Unlike a peer's, its call reads lengths on the host: it cannot be captured."""
        return Run(lambda: batch.reference().to(batch.dtype))


class NoAttention(Peer):
    """Leaves attention out: what the rest of a step takes."""

    name, title, checked = REST, "the step without attention", False

    def make(self, batch: Batch, way: str = "") -> Run:
        """Any output will do."""
        return Run(lambda: batch.out)


class Stack:
    """`layers` decoder layers over a decode workload: one token for each sequence, whose keys are in the
    cache but its own.

    The hidden size is query_heads * v_dim. Weights and caches are drawn from `seed`, in the layer's dtype.
    """

    def __init__(
        self, workload: Workload, layer: Mapping, device, layers: int, package: Package, seed: int = 0
    ):
        if workload.query_len != 1:
            raise Unavailable("a step is of one token for each sequence")
        self.workload, self.layer, self.package = workload, layer, package
        heads, kv_heads, qk_dim, v_dim = (
            layer[name] for name in ("query_heads", "kv_heads", "qk_dim", "v_dim")
        )
        self._split = [heads * qk_dim, kv_heads * qk_dim, kv_heads * v_dim]
        tokens, hidden = workload.tokens, heads * v_dim
        inner = -(-int(MLP * hidden) // STEP_OF_WIDTH) * STEP_OF_WIDTH
        generator = torch.Generator(device).manual_seed(seed)
        self.dtype, self.allowed = getattr(torch, layer["dtype"]), ALLOWED

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.empty(shape, dtype=self.dtype, device=device).normal_(0, scale, generator=generator)

        shapes = ((sum(self._split), hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner))
        self.weights = [[normal(*shape, scale=shape[1] ** -0.5) for shape in shapes] for _ in range(layers)]
        self.input = normal(tokens, hidden)
        self._fused = torch.empty(tokens, sum(self._split), dtype=self.dtype, device=device)
        parts = self._fused.split(self._split, dim=1)
        q, self._k, self._v = (
            part.unflatten(1, (-1, dim)) for part, dim in zip(parts, (qk_dim, qk_dim, v_dim))
        )
        self._rotary = {}
        if rotated := layer.get("rotary_dim"):
            positions = torch.tensor([keys - 1 for _, keys in workload.seqs], device=device)
            angles = torch.rand(workload.keys, rotated // 2, generator=generator, device=device) * 6.3
            tables = {"positions": positions, "cos": angles.cos(), "sin": angles.sin()}
            self._rotary = {"q": q, "q_out": torch.empty_like(q.contiguous()), **tables}
            q = self._rotary["q_out"]
        self.batches = [Batch(workload, layer, device, seed=seed + 1 + i, q=q) for i in range(layers)]
        last = torch.tensor([keys - 1 for _, keys in workload.seqs], device=device)
        page, offset = last // layer["page_size"], last % layer["page_size"]
        self._slots = [
            batch.block_table.gather(1, page[:, None])[:, 0].long() * layer["page_size"] + offset
            for batch in self.batches
        ]
        self._expected: Tensor | None = None

    @property
    def bytes(self) -> int:
        """Bytes that a step must move: its weights, and what attention moves in each layer."""
        weights = sum(weight.nbytes for of_layer in self.weights for weight in of_layer)
        return weights + len(self.weights) * self.workload.bytes(self.layer)

    @property
    def operations(self) -> int:
        """Multiplications and additions of a step's matrix products and attention."""
        weights = sum(weight.numel() for of_layer in self.weights for weight in of_layer)
        return 2 * self.workload.tokens * weights + len(self.weights) * self.workload.operations(self.layer)

    def enter(self, peer: Peer, way: str = "") -> Run:
        """A whole step with the attention of `peer`; its call returns the hidden state [tokens, hidden]."""
        if isinstance(peer, Dense):
            raise Unavailable("reads a dense cache, to which nothing appends")
        runs = [peer.make(batch, way) for batch in self.batches]
        return Run(lambda: self._step(runs))

    def _step(self, runs: list[Run]) -> Tensor:
        hidden = self.input
        for (qkv, back, gate_up, down), batch, slots, run in zip(
            self.weights, self.batches, self._slots, runs
        ):
            torch.mm(self._normed(hidden), qkv.T, out=self._fused)
            self.package.append(batch, self._k, self._v, slots, **self._rotary)
            hidden = hidden + linear(run.call().flatten(1), back)
            gate, up = linear(self._normed(hidden), gate_up).chunk(2, dim=1)
            hidden = hidden + linear(silu(gate) * up, down)
        return hidden

    def _normed(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, hidden.shape[1:])

    def poison(self) -> None:
        """Fill the outputs of every layer's attention with NaN."""
        for batch in self.batches:
            batch.poison()

    def error(self, hidden: Tensor) -> float:
        """Relative L2 distance of a step's hidden state from that of a step with float64 attention."""
        if self._expected is None:
            self._expected = self.enter(Reference()).call().double()
        distance = ((hidden.double() - self._expected).norm() / self._expected.norm()).item()
        return distance if distance == distance else float("inf")
