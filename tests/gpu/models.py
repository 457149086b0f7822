"""Small random models of transformers' classes with generated packages as their attention, against
transformers' own eager attention: prefill, decode, prompts in parts, batches. And MiniLM's embeddings.

    python tests/gpu/models.py --write build/models       # needs specgen, no GPU: configs and specs
    for spec in build/models/*.yaml; do specgen build "$spec"; done; pip install each wheel
    python tests/gpu/models.py --weights build/models/minilm  # on the GPU, with packages model_*_kernels

Error: relative L2 distance of the logits from a float32 eager run of the same weights, over all rows and of
the worst row. Ours may be at most twice that of eager attention in the packages' dtype, and each single call
of a kernel must be within the reference's tolerance of the reference on the same inputs (`kernel`: the worst
call in units of it). Exit status 1 otherwise. `--attention reference` runs the same plumbing over the float64
reference, on any machine; `--wrong` checks that this would notice one key too many and the like. Needs
transformers and no network.
"""

import argparse
import sys
import tempfile
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from models_minilm import MINILM, cosines, read, write_weights
from models_paged import INTERFACE, Interface, Kernels, Paged, from_package, from_spec
from models_zoo import MODELS, SEED, VOCABULARY, Model, build, replace_attention
from torch import Tensor

PROMPT, STEPS = 300, 16  # tokens
BATCH, BATCH_STEPS = (300, 37, 129), 6
PARTS = [171, 124, 5, 8, 1, 7]  # a second prefill crosses windows, chunks and pages; rows of speculation
FLOOR = 1e-5  # of an error that may be float32 arithmetic in another order
# Whatever eager attention does: four layers in bfloat16 are at 6e-3 to 1.7e-2, but BLOOM's own code rounds
# its ALiBi bias to bfloat16 and is at 9e-2.
CEILING = 2.5e-2
MIN_COSINE = 0.9999


@dataclass
class Errors:
    """Relative L2 distances from the truth: over all rows, and of the worst row."""

    whole: float
    row: float

    @classmethod
    def of(cls, logits: Tensor, truth: Tensor) -> "Errors":
        """Of logits [rows, vocabulary]; not finite is inf."""
        logits, truth = logits.double(), truth.double()
        apart = (logits - truth).norm(dim=-1).nan_to_num(nan=torch.inf)
        size = truth.norm(dim=-1)
        return cls((apart.norm() / size.norm()).item(), (apart / size).max().item())

    def within(self, theirs: "Errors") -> bool:
        """At most twice `theirs`; over all rows also at most CEILING."""
        bound = min(max(2 * theirs.whole, FLOOR), CEILING)
        return self.whole <= bound and self.row <= max(2 * theirs.row, FLOOR)


class Report:
    """The table on stdout; `failed` if a line since it was last set was a mismatch."""

    def __init__(self):
        self.failed = False
        columns = f"{'error':>9}{'row':>9}{'eager':>9}{'row':>9}{'kernel':>8}"
        print(f"{'model':10}{'run':22}{'rows':>5}{columns}  verdict")

    def line(
        self, model: str, run: str, rows: int, ours: Errors, eager: Errors, kernel: float | None
    ) -> None:
        """`kernel`: the worst call in units of its tolerance, None without a package."""
        right = ours.within(eager) and (kernel is None or kernel <= 1)
        self.failed |= not right
        worst = "" if kernel is None else f"{kernel:.2f}"
        numbers = "".join(f"{x:9.1e}" for x in (ours.whole, ours.row, eager.whole, eager.row))
        print(f"{model:10}{run:22}{rows:5}{numbers}{worst:>8}  {'ok' if right else 'MISMATCH'}", flush=True)


def spec_of(config, name: str, folder: Path) -> str:
    """Write config.json of a transformers configuration to `folder`; the spec text that `specgen init` makes
    of it.
    """
    from specgen.hf import import_config

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config.to_json_string(use_diff=False), "utf-8")
    return import_config(folder, name=f"model_{name}", targets=("h200",))


def kernels_of(config, name: str, attention: str) -> Kernels:
    """The package of a model, or the reference with the features of its spec."""
    if attention == "packages":
        return from_package(f"model_{name}_kernels")
    with tempfile.TemporaryDirectory() as folder:
        return from_spec(spec_of(config, name, Path(folder)))


def run(made, interface: Interface, paged: Paged, tokens: list[Tensor], schedule: list[list[int]]):
    """Feed `tokens` of each sequence in steps of so many rows; logits [rows, vocabulary] per sequence, in
    order.
    """
    from transformers import DynamicCache

    cache, done = DynamicCache(), [0] * len(tokens)
    logits: list[list[Tensor]] = [[] for _ in tokens]
    interface.paged = paged
    for rows in schedule:
        positions = paged.step(rows)
        fed = torch.zeros(len(rows), max(rows), dtype=torch.int64)
        for i, count in enumerate(rows):
            fed[i, :count] = tokens[i][done[i] : done[i] + count]
            done[i] += count
        out = made(
            fed.to(positions.device), position_ids=positions, past_key_values=cache, use_cache=True
        ).logits
        for i, count in enumerate(rows):
            logits[i].append(out[i, :count].float())
    return [torch.cat(parts) for parts in logits]


class Check:
    """One model: its truth, eager attention in its dtype, and ours."""

    def __init__(self, model: Model, kernels: Kernels, interface: Interface, dtype, device):
        self.model, self.kernels, self.interface, self.dtype, self.device = (
            model,
            kernels,
            interface,
            dtype,
            device,
        )
        random = torch.Generator().manual_seed(SEED)
        longest = [max(PROMPT + STEPS, sum(PARTS)), *(n + BATCH_STEPS for n in BATCH[1:])]
        self.tokens = [torch.randint(3, VOCABULARY, (n,), generator=random) for n in longest]
        self.made = build(model, dtype, dtype, device, INTERFACE)
        if model.forward:
            replace_attention(model, self.made, interface.attend)
        config = self.made.config
        self.count = config.num_hidden_layers
        self.slopes = model.slopes(config.num_attention_heads) if model.slopes else None
        self.eager, self.truth = (
            self._whole(build(model, dtype, compute, device)) for compute in (dtype, torch.float32)
        )

    def _whole(self, made) -> list[Tensor]:
        """Logits of each sequence, by one forward pass without a cache."""
        return [made(x[None].to(self.device), use_cache=False).logits[0].float() for x in self.tokens]

    def session(self, kernels: Kernels, schedule: list[list[int]], explicit: bool = False):
        """Logits by sequence, and the worst call of the kernels."""
        seqs, capacity = len(schedule[0]), max(map(len, self.tokens))
        slopes = (self.slopes, explicit)
        paged = Paged(kernels, self.count, seqs, capacity, self.dtype, self.device, *slopes)
        ours = run(self.made, self.interface, paged, self.tokens[:seqs], schedule)
        if paged.calls != len(schedule) * self.count:
            raise RuntimeError(
                f"{self.model.name}: {paged.calls} calls of attention; needs one per layer and step"
            )
        return ours, paged.worst if kernels.package else None

    def errors(self, ours: list[Tensor], rows: list[slice]) -> tuple[int, Errors, Errors]:
        """Rows compared, our errors and eager's, of those rows of each sequence."""
        mine, eager, truth = (
            torch.cat([x[cut] for x, cut in zip(group, rows)]) for group in (ours, self.eager, self.truth)
        )
        return len(truth), Errors.of(mine, truth), Errors.of(eager, truth)

    def all(self, report: Report) -> bool:
        """Every run of the model; False if one is a mismatch."""
        name, report.failed = self.model.name, False
        ours, worst = self.session(self.kernels, [[PROMPT]] + [[1]] * STEPS)
        report.line(name, f"prefill {PROMPT}", *self.errors(ours, [slice(PROMPT)]), worst)
        report.line(name, f"decode {STEPS}", *self.errors(ours, [slice(PROMPT, None)]), worst)
        ours, worst = self.session(self.kernels, [[rows] for rows in PARTS], explicit=True)
        report.line(name, "+".join(map(str, PARTS)), *self.errors(ours, [slice(sum(PARTS))]), worst)
        steps = BATCH_STEPS if self.model.decodes_batches else 0
        ours, worst = self.session(self.kernels, [list(BATCH)] + [[1] * len(BATCH)] * steps)
        label = "/".join(map(str, BATCH))
        report.line(name, f"batch {label}", *self.errors(ours, [slice(n) for n in BATCH]), worst)
        if steps:
            rows = [slice(n, n + steps) for n in BATCH]
            report.line(name, f"batch decode {steps}", *self.errors(ours, rows), worst)
        return not report.failed

    def wrong(self) -> bool:
        """Whether every wrong feature of the model's layers would be a mismatch, in prefill and in decode."""
        noticed = True
        for label, kernels in wrong_kernels(self.kernels):
            ours, _ = self.session(kernels, [[PROMPT]] + [[1]] * STEPS)
            for part, rows in (("prefill", slice(PROMPT)), ("decode", slice(PROMPT, None))):
                _, mine, eager = self.errors(ours, [rows])
                seen = not mine.within(eager)
                noticed &= seen
                numbers = f"{mine.whole:9.1e}{mine.row:9.1e}{eager.whole:9.1e}{eager.row:9.1e}"
                what = f"{label}, {part}"
                print(
                    f"{self.model.name:10}{what:32}{numbers}  {'noticed' if seen else 'MISSED'}", flush=True
                )
        return noticed


def wrong_kernels(kernels: Kernels):
    """(what is wrong, the kernels with it) for each feature that some layer has."""
    changes = {
        "sliding_window": [("window + 1", lambda x: x + 1), ("window - 1", lambda x: x - 1)],
        "chunk": [("chunk + 1", lambda x: x + 1), ("chunk - 1", lambda x: x - 1)],
        "softcap": [("softcap + 20 %", lambda x: x * 1.2), ("no softcap", lambda x: None)],
        "sinks": [("no sinks", lambda x: False)],
        "alibi": [("no slopes", lambda x: False)],
        "scale": [("scale + 10 %", lambda x: x * 1.1)],
    }
    for field, variants in changes.items():
        for label, change in variants:
            layers = deepcopy(kernels.layers)
            changed = [entry for entry in layers if entry[field]]
            for entry in changed:
                entry.update({field: change(entry[field]), "wrong": True})
            if changed:
                yield label, Kernels(layers, kernels.reference)


def check_minilm(weights: str | None, attention: str, interface: Interface, device, dtype) -> bool:
    """Embeddings of a dozen sentences in one batch, and of each alone; prints the cosines."""
    files = read(weights)
    kernels = kernels_of(files.config(), MINILM, attention)
    own = files.embed(files.build("eager", dtype, dtype, device), device)
    truth = files.embed(files.build("eager", dtype, torch.float32, device), device)
    made = files.build(INTERFACE, dtype, dtype, device)
    right = True
    for label, alone in (("one batch", False), ("one by one", True)):
        used: list[Paged] = []

        def begin(lengths: list[int], used: list[Paged] = used) -> None:
            paged = Paged(kernels, made.config.num_hidden_layers, len(lengths), max(lengths), dtype, device)
            interface.paged = paged
            paged.step(lengths)
            used.append(paged)

        ours = files.embed(made, device, begin, alone)
        worst = max(x.worst for x in used) if kernels.package else 0.0
        if not used or any(x.calls != made.config.num_hidden_layers for x in used):
            raise RuntimeError(f"{MINILM}: {[x.calls for x in used]} calls of attention; needs one per layer")
        pairs = [cosines(a, b).min().item() for a, b in ((ours, own), (ours, truth), (own, truth))]
        ok = min(pairs[:2]) > MIN_COSINE and worst <= 1
        right &= ok
        text = f"least cosine with its own attention {pairs[0]:.6f}, with float32 {pairs[1]:.6f}"
        tail = f" (its own: {pairs[2]:.6f}), kernel {worst:.2f}"
        print(f"{MINILM:10}{label:14}{len(ours)} sentences, {text}{tail}  {'ok' if ok else 'MISMATCH'}")
    return right


def write(folder: Path, names: list[str], weights: str | None) -> None:
    """FOLDER/NAME/config.json and FOLDER/model_NAME.yaml of each model; MiniLM's weights in float16 too."""
    for model in (m for m in MODELS if m.name in names):
        text = spec_of(model.config(), model.name, folder / model.name)
        (folder / f"model_{model.name}.yaml").write_text(text, "utf-8")
    if MINILM in names:
        files = read(weights)
        text = spec_of(files.config(), MINILM, folder / MINILM)
        (folder / f"model_{MINILM}.yaml").write_text(text, "utf-8")
        write_weights(files, folder / MINILM)


def main() -> int:
    everything = [*(model.name for model in MODELS), MINILM]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="DIR", help="write configs and specs, run nothing")
    parser.add_argument("--attention", default="packages", choices=("packages", "reference"))
    parser.add_argument("--only", action="append", choices=everything, help="this model (may be repeated)")
    parser.add_argument("--wrong", action="store_true", help="reference only: are wrong features noticed?")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the packages"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--weights", help=f"folder of MiniLM (default: of the package gt-all-{MINILM}-l6-v2)")
    options = parser.parse_args()
    names, device = options.only or everything, torch.device(options.device)
    if options.write:
        write(options.write, names, options.weights)
        return 0
    if options.wrong and options.attention != "reference":
        parser.error("--wrong needs --attention reference")
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("highest")  # the truth
    interface, dtype = Interface(), getattr(torch, options.dtype)
    print(f"{options.attention}, {options.dtype} on {device}, torch {torch.__version__}")
    report, failed = Report(), False
    names = [name for name in names if not (options.wrong and name == MINILM)]
    for name in names:
        try:
            if name == MINILM:
                half = torch.float16 if dtype == torch.bfloat16 else dtype
                right = check_minilm(options.weights, options.attention, interface, device, half)
            else:
                model = next(model for model in MODELS if model.name == name)
                kernels = kernels_of(model.config(), name, options.attention)
                check = Check(model, kernels, interface, dtype, device)
                right = check.wrong() if options.wrong else check.all(report)
        except Exception as error:  # noqa: BLE001 - the other models are still worth knowing
            print(f"{name:10}FAILED: {type(error).__name__}: {str(error)[:600]}", flush=True)
            right = False
        failed |= not right
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
