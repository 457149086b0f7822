"""What the compile stage of `specgen tune` leaves for the measure stage: a package of every candidate, and trials.json beside it.

    build/<spec>/tuning/<arch>/<package>/     the generated package, its manifest with every candidate that compiled
    build/<spec>/tuning/<arch>/trials.json    the candidates of each geometry, those that did not compile too; the batches

Reads and writes trials.json alone. Needs no Triton and no GPU; what is in the package is for trial.py.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from specgen import json_text
from specgen.bench.workloads import parse
from specgen.errors import SpecError, SpecgenError, one_line, shown
from specgen.tuning.records import ORIGIN, Launch, build
from specgen.variant import Config, Geometry

FILE = "trials.json"
FORMAT = 1


@dataclass(frozen=True)
class Candidate:
    """One kernel: what it is to a schedule, and what became of its compile ("ok", "compile", "budget", with the reason)."""

    role: str  # "decode", "prefill" or "varlen"
    launch: Launch
    max_query_len: int | None  # as in Variant
    symbol: str
    digest: str
    status: str = "ok"
    detail: str = ""

    @property
    def untuned(self) -> bool:
        """Whether the product launches it without measurements."""
        return self.launch.config.origin != ORIGIN


@dataclass(frozen=True)
class Group:
    """The candidates of one geometry. `layer` is the manifest's entry that tensors are made for, with a rank's heads."""

    geometry: Geometry
    layer: dict
    candidates: tuple[Candidate, ...]

    def of(self, role: str, max_query_len: int | None) -> list[Candidate]:
        """Those of a role that compiled, the product's untuned choice first where it is one of them."""
        return [c for c in self.candidates if (c.role, c.max_query_len, c.status) == (role, max_query_len, "ok")]


@dataclass(frozen=True)
class Bundle:
    """A bundle in a folder: for which spec (name, digest) and arch, compiled by what, with which candidates and batches.

    query_lens: bounds on query rows per sequence that decode candidates were made for, rising; prefill begins above them.
    """

    folder: Path
    package: str
    spec: str
    spec_sha256: str
    arch: str
    triton: str
    ptxas: str
    aligned: bool
    query_lens: tuple[int, ...]
    groups: tuple[Group, ...]
    workloads: tuple[str, ...]  # names, as bench/workloads.py spells them

    @cached_property
    def manifest(self) -> dict:
        """The package's manifest. SpecgenError if it is damaged."""
        path = self.folder / self.package / "manifest.json"
        found = _read(path)
        if not isinstance(found.get("limits"), dict) or self._target_in(found) is None:
            raise SpecgenError(f"{path}: needs limits and a target of {self.arch}; make the bundle anew")
        return found

    def _target_in(self, manifest: dict) -> dict | None:
        try:
            return next((target for target in manifest["targets"] if target["arch"] == self.arch), None)
        except (LookupError, TypeError):
            return None

    @cached_property
    def stamp(self) -> str:
        """Changes with the bundle's content: a process that loaded another bundle cannot run this one's trials."""
        return sha256((self.folder / FILE).read_bytes() + json.dumps(self.manifest).encode()).hexdigest()

    @property
    def summary(self) -> str:
        """Such as "180 kernels to try, 12 over a budget, 0 that do not compile; 93 batches"."""
        statuses = [candidate.status for group in self.groups for candidate in group.candidates]
        words = {"ok": "kernels to try", "budget": "over a budget", "compile": "that do not compile"}
        counted = ", ".join(f"{statuses.count(status)} {text}" for status, text in words.items())
        return f"{counted}; {len(self.workloads)} batches"

    @property
    def limits(self) -> dict[str, int]:
        """The spec's."""
        return self.manifest["limits"]

    @property
    def target(self) -> dict:
        """The manifest's entry of the first GPU of this arch."""
        return self._target_in(self.manifest)


def tuning_folder(build_dir: Path, spec: str) -> Path:
    """Where the bundles and the measurements of a spec (by name) lie; a bundle in a folder named after its arch."""
    return build_dir / spec / "tuning"


def store_in(folder: Path) -> Path:
    """The file of the measurements in such a folder."""
    return folder / "measurements.sqlite"


def to_json(bundle: Bundle) -> bytes:
    """The content of trials.json."""
    fields = {
        "format": FORMAT,
        **{name: value for name, value in vars(bundle).items() if name in _PLAIN},
        "groups": [_group_fields(group) for group in bundle.groups],
        "workloads": list(bundle.workloads),
    }
    return (json.dumps(fields, indent=1) + "\n").encode()


# What measuring reads of a layer.
_LAYER = ("name", "query_heads", "kv_heads", "qk_dim", "v_dim", "scale", "mask", "page_size", "dtype")
_PLAIN = ("package", "spec", "spec_sha256", "arch", "triton", "ptxas", "aligned", "query_lens")


def read_bundle(folder: Path) -> Bundle:
    """The bundle in `folder`. SpecgenError if there is none, or of another format, or it is damaged."""
    path = folder / FILE
    if not path.is_file():
        raise SpecgenError(f"{path}: no such file; needs a bundle, which `specgen tune SPEC --compile-only` makes")
    fields = _read(path)
    try:
        if fields["format"] != FORMAT:
            raise SpecgenError(f"{path}: format {shown(fields['format'])}, this specgen reads {FORMAT}; make the bundle anew")
        del fields["format"]
        lists = {name: tuple(fields[name]) for name in ("query_lens", "workloads")}
        groups = tuple(_group_of(group, f"groups.{place}") for place, group in enumerate(fields["groups"]))
        bundle = build(Bundle, {**fields, **lists, "groups": groups, "folder": folder}, "bundle")
        for fault in _faults(bundle):
            raise ValueError(fault)
        return bundle
    except KeyError as error:
        raise SpecgenError(f"{path}: damaged (has no {error}); make the bundle anew") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise SpecgenError(f"{path}: damaged ({one_line(str(error))}); make the bundle anew") from error


def _faults(bundle: Bundle) -> Iterator[str]:
    """What of well-typed fields cannot be."""
    if not bundle.package.isidentifier():
        yield f"package: needs a Python identifier, got {bundle.package!r}"
    if not bundle.groups:
        yield "groups: needs one at least"
    if not bundle.query_lens or min(bundle.query_lens) < 1 or sorted({*bundle.query_lens}) != list(bundle.query_lens):
        yield f"query_lens: needs rising numbers of at least 1, got {bundle.query_lens}"
    for place, name in enumerate(bundle.workloads):
        try:
            parse(name)
        except SpecgenError as error:
            yield f"workloads.{place}: {error}"
    for place, group in enumerate(bundle.groups):
        heads = group.geometry.query_heads, group.geometry.kv_heads
        if min(*heads, group.geometry.qk_dim, group.geometry.v_dim, group.geometry.page_size) < 1 or heads[0] % heads[1]:
            yield f"groups.{place}.geometry: no attention has such sizes"
        for name, value in group.layer.items():
            if value != getattr(group.geometry, name, value) and not name.startswith("rotary"):
                yield f"groups.{place}.layer.{name}: {value!r} is not the geometry's {getattr(group.geometry, name)!r}"
        if missing := [name for name in _LAYER if name not in group.layer]:
            yield f"groups.{place}.layer: has no {missing[0]!r}"
        if not isinstance(group.layer["name"], str):
            yield f"groups.{place}.layer.name: needs text, got {group.layer['name']!r}"


def find_bundles(folder: Path) -> list[Bundle]:
    """The bundle in `folder`, or those in its folders: one per arch. SpecgenError if there is none."""
    inside = sorted(path.parent for path in folder.glob(f"*/{FILE}"))
    return [read_bundle(each) for each in inside] or [read_bundle(folder)]


def _read(path: Path) -> dict:
    try:
        found = json_text.read(path)
    except SpecError as error:
        raise SpecgenError(f"{error}; make the bundle anew") from error
    if not isinstance(found, dict):
        raise SpecgenError(f"{path}: damaged (needs a mapping of fields, got {shown(found)}); make the bundle anew")
    return found


def _group_fields(group: Group) -> dict:
    return {
        "geometry": asdict(group.geometry),
        "layer": group.layer,
        "candidates": [_candidate_fields(candidate) for candidate in group.candidates],
    }


def _candidate_fields(candidate: Candidate) -> dict:
    config = asdict(candidate.launch.config) | {"options": dict(candidate.launch.config.options)}
    own = {name: value for name, value in vars(candidate).items() if name != "launch"}
    return {"family": candidate.launch.family, "config": config, **own}


def _group_of(fields: dict, place: str) -> Group:
    candidates = (_candidate_of(each, f"{place}.candidates.{n}") for n, each in enumerate(fields["candidates"]))
    geometry = build(Geometry, fields["geometry"], f"{place}.geometry")
    return build(Group, {**fields, "geometry": geometry, "candidates": tuple(candidates)}, place)


def _candidate_of(fields: dict, place: str) -> Candidate:
    own = dict(fields)
    config = dict(own.pop("config"))
    config["options"] = tuple(sorted(config["options"].items()))
    launch = build(Launch, {"family": own.pop("family"), "config": build(Config, config, f"{place}.config")}, place)
    return build(Candidate, {**own, "launch": launch}, place)
