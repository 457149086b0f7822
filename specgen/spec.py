"""The spec: what a user writes about a model's attention, as frozen, strictly checked data.

Nouns only: imports nouns, touches no file. A spec's texts reach generated code only as identifiers (`name`,
layer names) or as members of closed lists; everything else is a number. Which fields a template implements is
not decided here (see rules.py).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from .dtypes import CACHE_DTYPES, DTYPES
from .errors import shown
from .explanations import near
from .fields import (
    HEAD_DIM_MAX,
    HEAD_DIM_MIN,
    HEAD_DIM_STEP,
    LAYERS_SCHEMA,
    MAX_NAME,
    MAX_SEQ_LEN,
    check_identifier,
    check_layers,
    check_module_name,
    check_version,
    layer_indices,
    listed,
)
from .target import load_targets

ComputeDType = Literal[tuple(DTYPES)]  # type: ignore[valid-type]
CacheDType = Literal[tuple(CACHE_DTYPES)]  # type: ignore[valid-type]
HeadCount = Annotated[int, Field(ge=1, le=1024)]
_NAME_SCHEMA = Field(json_schema_extra={"pattern": "^[a-z][a-z0-9]*(_[a-z0-9]+)*$", "maxLength": MAX_NAME})
LayerName = Annotated[
    str, AfterValidator(check_identifier), _NAME_SCHEMA
]  # "global" is one: it never stands alone
ModuleName = Annotated[str, AfterValidator(check_module_name), _NAME_SCHEMA]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Dim = Annotated[int, Field(ge=HEAD_DIM_MIN, le=HEAD_DIM_MAX, multiple_of=HEAD_DIM_STEP)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class HeadDim(_Strict):
    """Elements of one head: `qk` of queries and keys, `v` of values and outputs."""

    qk: Dim = Field(description="Elements of a query or key head.")
    v: Dim = Field(description="Elements of a value or output head.")


def _head_dim(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        if not HEAD_DIM_MIN <= value <= HEAD_DIM_MAX or value % HEAD_DIM_STEP:
            raise ValueError(
                f"needs a multiple of {HEAD_DIM_STEP} from {HEAD_DIM_MIN} to {HEAD_DIM_MAX}, "
                f"got {shown(value)}"
            )
        return HeadDim(qk=value, v=value)
    if isinstance(value, Mapping | HeadDim):
        return value
    raise ValueError(f"needs an integer or {{qk: ..., v: ...}}, got {shown(value)}")


class Rotary(_Strict):
    """Rotary embedding fused into append_kv: it rotates keys on their way to the cache, and queries in the same launch."""

    dim: int = Field(
        ge=2, le=HEAD_DIM_MAX, multiple_of=2, description="Leading elements of a head that are rotated."
    )
    style: Literal["half", "interleaved"] = Field(
        description="Which two elements turn together: d and d + dim/2, or 2d and 2d + 1."
    )


class Source(_Strict):
    """Where the spec comes from; written by `specgen init`, read by nobody but people."""

    config: str | None = Field(None, max_length=500, description="The model or file it was imported from.")
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$", description="Digest of that file.")


class AttentionSpec(_Strict):
    """One layer class: layers whose attention has the same geometry and the same mask."""

    name: LayerName = Field(description="The layer class; the `layer` argument of `attention`.")
    layers: Annotated[str | tuple[int, ...], PlainValidator(check_layers), WithJsonSchema(LAYERS_SCHEMA)] = (
        Field(
            "all",
            description="Layers of the class: all, a list of indices from 0, or a slice start:stop:step.",
        )
    )
    query_heads: HeadCount = Field(description="Query heads of the whole model, before tensor parallelism.")
    kv_heads: HeadCount = Field(description="Key/value heads of the whole model; divides query_heads.")
    head_dim: Annotated[
        HeadDim,
        BeforeValidator(_head_dim),
        WithJsonSchema(
            {
                "anyOf": [
                    {
                        "type": "integer",
                        "minimum": HEAD_DIM_MIN,
                        "maximum": HEAD_DIM_MAX,
                        "multipleOf": HEAD_DIM_STEP,
                    },
                    HeadDim.model_json_schema(),
                ]
            }
        ),
    ] = Field(
        description="Elements of one head, or {qk, v} where values have another size than queries and keys."
    )
    scale: PositiveFloat | None = Field(
        None, description="Factor of the logits; null is 1/sqrt(head_dim.qk)."
    )
    mask: Literal["causal", "bidirectional"] = Field(
        "causal", description="Which keys a query sees, before windows and chunks."
    )
    sliding_window: Annotated[int, Field(ge=1, le=MAX_SEQ_LEN)] | None = Field(
        None, description="A query sees this many keys, its own included; null is no window."
    )
    chunk: Annotated[int, Field(ge=1, le=MAX_SEQ_LEN)] | None = Field(
        None,
        description="A query sees only keys of its own block of this many positions; never a window.",
    )
    softcap: PositiveFloat | None = Field(None, description="c in c * tanh(logit / c); null is off.")
    sinks: bool = Field(
        False, description="One learned logit per query head that takes weight and gives no value."
    )
    alibi: bool = Field(
        False, description="A bias of -slope * |key position - query position|, one slope per query head."
    )
    rotary: Rotary | None = Field(None, description="Rotary embedding fused into append_kv; null is off.")
    prefix_ranges: bool = Field(False, description="Bidirectional spans inside a causal sequence.")
    cross: bool = Field(False, description="Queries attend to the keys of a cached encoder.")

    @field_validator("kv_heads")
    @classmethod
    def _divides(cls, kv_heads: int, info: ValidationInfo) -> int:
        query_heads = info.data.get("query_heads")
        if query_heads is not None and query_heads % kv_heads:
            raise ValueError(f"needs a divisor of query_heads ({query_heads}), got {kv_heads}")
        return kv_heads

    @field_validator("chunk")
    @classmethod
    def _not_both(cls, chunk: int | None, info: ValidationInfo) -> int | None:
        if chunk is not None and info.data.get("sliding_window") is not None:
            raise ValueError(
                "excludes sliding_window: a layer class has a chunk or a window; set one of them to null"
            )
        return chunk

    @field_validator("rotary")
    @classmethod
    def _fits(cls, rotary: Rotary | None, info: ValidationInfo) -> Rotary | None:
        head_dim = info.data.get("head_dim")
        if rotary is not None and head_dim is not None and rotary.dim > head_dim.qk:
            raise ValueError(f"rotates {rotary.dim} elements of a head of {head_dim.qk}")
        return rotary

    @property
    def resolved_scale(self) -> float:
        """The factor of the logits: `scale`, or 1/sqrt(head_dim.qk)."""
        return self.head_dim.qk**-0.5 if self.scale is None else self.scale

    def per_rank(self, degree: int) -> tuple[int, int]:
        """(query_heads, kv_heads) of one of `degree` ranks; raises ValueError with the reason if the degree
        is not legal.
        """
        return heads_per_rank(self.query_heads, self.kv_heads, degree)


def heads_per_rank(query_heads: int, kv_heads: int, degree: int) -> tuple[int, int]:
    """Split heads over `degree` tensor-parallel ranks; raises ValueError with the reason where that is not
    legal.

    A degree divides query_heads, and either divides kv_heads or is a multiple of it; then a rank holds one
    replicated KV head.
    """
    if query_heads % degree:
        raise ValueError(f"{degree} does not divide query_heads ({query_heads})")
    if kv_heads % degree == 0:
        return query_heads // degree, kv_heads // degree
    if degree % kv_heads == 0:
        return query_heads // degree, 1
    raise ValueError(f"{degree} neither divides kv_heads ({kv_heads}) nor is a multiple of it")


class KVCacheSpec(_Strict):
    """The paged cache of keys and values."""

    dtype: CacheDType = Field(description="Element type of the cache.")
    page_size: int = Field(ge=1, le=2048, description="Tokens of one page.")
    layout: Literal["NHD", "HND"] = Field(
        "NHD", description="Order inside a page: tokens, heads, elements, or heads first."
    )
    scales: Literal["tensor", "head", "token_head"] | None = Field(
        None, description="What one FP8 scale belongs to; null is none."
    )


class Limits(_Strict):
    """What one call may hold at most. Dispatch rows cover exactly this domain."""

    max_seqs: int = Field(ge=1, le=4096, description="Sequences of one call.")
    max_seq_len: int = Field(ge=1, le=MAX_SEQ_LEN, description="Keys of one sequence.")
    max_tokens: int = Field(ge=1, le=1 << 20, description="Query tokens of one call.")
    max_spec_tokens: int = Field(
        ge=1, le=64, description="Query tokens of one sequence that the decode kernels take."
    )

    @field_validator("max_spec_tokens")
    @classmethod
    def _within(cls, max_spec_tokens: int, info: ValidationInfo) -> int:
        max_tokens = info.data.get("max_tokens")
        if max_tokens is not None and max_spec_tokens > max_tokens:
            raise ValueError(f"needs at most max_tokens ({max_tokens}), got {max_spec_tokens}")
        return max_spec_tokens


class Spec(_Strict):
    """A whole spec, version 1."""

    version: Annotated[int, AfterValidator(check_version), WithJsonSchema({"const": 1})] = Field(
        description="The version of this format: 1."
    )
    name: ModuleName = Field(
        description="The model: import name <name>_kernels, distribution the same with dashes."
    )
    source: Source | None = Field(None, description="Where the spec comes from; optional.")
    dtype: ComputeDType = Field(description="Element type of queries and outputs.")
    attention: Annotated[
        tuple[AttentionSpec, ...], BeforeValidator(listed), Field(min_length=1, max_length=64)
    ] = Field(description="The layer classes.")
    kv_cache: KVCacheSpec = Field(
        description="How keys and values are kept: element type, page size, layout."
    )
    tensor_parallel: Annotated[
        tuple[Annotated[int, Field(ge=1, le=1024)], ...],
        BeforeValidator(listed),
        Field(min_length=1, max_length=64),
    ] = Field((1,), description="Tensor-parallel degrees; each gets kernels for its own head counts.")
    targets: Annotated[tuple[str, ...], BeforeValidator(listed), Field(min_length=1, max_length=64)] = Field(
        description="Ids of the GPUs to build for."
    )
    limits: Limits = Field(description="What one call may hold at most.")
    batch_invariant: bool = Field(
        False, description="No bit of a sequence's result depends on the other sequences of a call."
    )

    @model_validator(mode="wrap")
    @classmethod
    def _all_at_once(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> "Spec":
        """Fields and the rules between them in one report: the rules read whatever part of the input is well
        formed.
        """
        mistakes: list[InitErrorDetails] = []
        spec = None
        try:
            spec = handler(value)
        except ValidationError as error:
            for mistake in error.errors(include_url=False):
                mistakes.append(
                    InitErrorDetails({k: mistake[k] for k in ("type", "loc", "input", "ctx") if k in mistake})
                )
        if isinstance(value, Mapping):
            for loc, message in _rules(value):
                error = PydanticCustomError("value_error", "{error}", {"error": message})
                mistakes.append(InitErrorDetails(type=error, loc=loc, input=None))
        if mistakes or spec is None:
            raise ValidationError.from_exception_data("Spec", mistakes)
        return spec

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content in canonical form, in hex: comments, order of keys and omitted defaults do
        not change it.
        """
        # `layers` has its own validator; its union serializer warns of tuples that it writes correctly.
        content = json.dumps(self.model_dump(mode="json", warnings=False), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()


def _rules(data: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """(place, message) for every broken rule that spans fields of different parts of a spec.

    `data` is raw input; a part of the wrong form is passed over here, because its own check reports it.
    """
    entries = [
        (i, entry) for i, entry in enumerate(_items(data.get("attention"))) if isinstance(entry, Mapping)
    ]
    yield from _layer_rules(entries)
    degrees = list(_items(data.get("tensor_parallel")))
    for position, degree in enumerate(degrees):
        if not _count(degree):
            continue
        if degree in degrees[:position]:
            yield ("tensor_parallel", position), f"{degree} is listed twice"
        for _, entry in entries:
            query_heads, kv_heads = entry.get("query_heads"), entry.get("kv_heads")
            if not (_count(query_heads) and _count(kv_heads)) or query_heads % kv_heads:
                continue
            try:
                heads_per_rank(query_heads, kv_heads, degree)
            except ValueError as reason:
                name = shown(entry.get("name"))
                yield (
                    "tensor_parallel",
                    position,
                ), f"degree {degree} is not legal for attention {name}: {reason}"
    targets = list(_items(data.get("targets")))
    for position, target in enumerate(targets):
        if isinstance(target, str) and target not in load_targets():
            hint = near(target, load_targets()) or f"known: {', '.join(load_targets())}"
            yield ("targets", position), f"unknown target {shown(target)}; {hint}"
        elif isinstance(target, str) and target in targets[:position]:
            yield ("targets", position), f"{target!r} is listed twice"


def _layer_rules(entries: list[tuple[int, Mapping[str, Any]]]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    names: list[object] = []
    taken: dict[bool, dict[int, str]] = {False: {}, True: {}}  # self and cross attention may share a layer
    for position, entry in entries:
        name = entry.get("name")
        if isinstance(name, str) and name in names:
            yield (
                "attention",
                position,
                "name",
            ), f"{shown(name)} names an earlier entry too; needs a name of its own"
        names.append(name)
        try:
            indices = layer_indices(check_layers(entry.get("layers", "all")))
        except ValueError:
            continue
        owners = taken[entry.get("cross") is True]
        if both := sorted(indices & owners.keys()):
            yield (
                "attention",
                position,
                "layers",
            ), f"layer {both[0]} belongs to attention {owners[both[0]]} too"
        owners.update(dict.fromkeys(indices - owners.keys(), shown(name)))


def _items(value: object) -> list[Any] | tuple[Any, ...]:
    return value if isinstance(value, list | tuple) else ()


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1024


SCHEMA_TITLE = "specgen spec"  # what the title begins with in every version


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a spec, for editors: every field with its description, closed lists and bounds."""
    schema = Spec.model_json_schema()
    targets = schema["properties"]["targets"]
    targets["items"] = {"type": "string", "enum": list(load_targets())}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": f"{SCHEMA_TITLE}, version 1",
    }
