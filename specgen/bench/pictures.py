"""A result as PNG: latency by length, fraction of the roofline, ratio to each contender, share of decode.

Imports matplotlib when asked, and draws without a display. A picture for which the rows hold nothing is left
out.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from specgen.bench.results import REST, SUBJECT, contenders, ratio
from specgen.bench.workloads import Workload, parse, spell
from specgen.errors import SpecgenError

# A colour-blind safe palette (Okabe and Ito); the subject is black and bold.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#F0E442")
MARKERS = "osD^vP*X"
LEAST_POINTS, MOST_PANELS = 3, 6
DPI = 130


def draw(result: Mapping, folder: Path) -> list[Path]:
    """Write the pictures into `folder`; their paths. SpecgenError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise SpecgenError("pictures need matplotlib; pip install matplotlib") from error
    matplotlib.use("Agg")
    written = []
    for name, picture in {
        "latency.png": latency,
        "roofline.png": roofline,
        "ratios.png": ratios,
        "shares.png": shares,
    }.items():
        figure = picture(result)
        if figure is not None:
            written.append(folder / name)
            figure.savefig(written[-1], dpi=DPI, metadata={"Software": None})
    return written


def style(result: Mapping, name: str) -> dict:
    """Colour, marker and width of a contender's line, the same in every picture of a result."""
    others = [other for other in result["peers"] if other != SUBJECT]
    if name == SUBJECT:
        return {"color": "black", "marker": "o", "linewidth": 2.2, "zorder": 5}
    place = others.index(name)
    colour, marker = COLOURS[place % len(COLOURS)], MARKERS[(1 + place) % len(MARKERS)]
    return {"color": colour, "marker": marker, "linewidth": 1.2}


def label(result: Mapping, name: str) -> str:
    """A contender's name in a legend."""
    return name if name == SUBJECT else result["peers"][name]["title"]


Panels = dict[tuple, dict[float, Mapping]]


def series(result: Mapping) -> Panels:
    """(geometry, what stays the same) -> keys -> row, of uniform batches that differ in keys alone."""
    found: Panels = {}
    for row in result["rows"]:
        workload = parse(row["workload"])
        if workload.uniform and workload.kind in ("dec", "spec", "pre"):
            rows, keys = workload.uniform
            what = {"dec": "decode", "spec": f"{rows} query rows", "pre": "first prefill"}[workload.kind]
            found.setdefault((row["geometry"], f"{what}, batch {len(workload.seqs)}"), {})[keys] = row
    return _long(found, key=lambda item: -len(item[1]))


def latency(result: Mapping):
    """Time by length, a panel for each series of at least three lengths; None without one."""

    def describe(axis, name: tuple, rows: Mapping) -> None:
        geometry, same = name
        axis.set(title=f"{same}\n{geometry}", xlabel="keys", xscale="log", yscale="log")
        axis.set_xticks(list(rows), [spell(keys) for keys in rows])
        axis.minorticks_off()

    return _lines(result, series(result), describe)


def shares(result: Mapping):
    """Time by share of decoding sequences, a panel for each length; None without such rows."""
    found: Panels = {}
    for row in result["rows"]:
        workload = parse(row["workload"])
        if (share := decode_share(workload)) is not None:
            found.setdefault((row["geometry"], len(workload.seqs), workload.keys), {})[share] = row

    def describe(axis, name: tuple, rows: Mapping) -> None:
        geometry, seqs, keys = name
        title = f"{seqs} sequences of {spell(keys)} keys\n{geometry}"
        axis.set(title=title, xlabel="share of sequences that decode", yscale="log")
        axis.set_xticks(list(rows))

    return _lines(result, _long(found, key=lambda item: item[0]), describe)


def decode_share(workload: Workload) -> float | None:
    """Share of sequences of one row, where keys are equal and the others are first prefills; else None."""
    if len({keys for _, keys in workload.seqs}) > 1 or not all(
        rows in (1, keys) for rows, keys in workload.seqs
    ):
        return None
    return sum(rows == 1 for rows, _ in workload.seqs) / len(workload.seqs)


def _long(panels: Panels, key: Callable) -> Panels:
    """The first panels by `key` of those with enough points, each sorted by place."""
    long = {name: dict(sorted(rows.items())) for name, rows in panels.items() if len(rows) >= LEAST_POINTS}
    return dict(sorted(long.items(), key=key)[:MOST_PANELS])


def _lines(result: Mapping, panels: Panels, describe: Callable):
    """A figure of panels: a line for each contender, interrupted where it has no time, and the floor."""
    if not panels:
        return None
    figure, axes = _figure(result, len(panels))
    for axis, (name, rows) in zip(axes, panels.items()):
        for who in contenders(result, rows.values()):
            times = [row["times_us"].get(who, float("nan")) for row in rows.values()]
            axis.plot(rows.keys(), times, label=label(result, who), **style(result, who))
        floors = [row["floor_us"] for row in rows.values()]
        axis.plot(rows.keys(), floors, "k--", linewidth=0.8, label="roofline floor")
        axis.set_ylabel("GPU time, us")
        describe(axis, name, rows)
    return _finished(figure, axes)


def roofline(result: Mapping):
    """Fraction of the roofline floor that each contender reaches, by workload; None without rows."""
    title = "floor / time (1 is the roofline)"
    return _dots(result, lambda row, name: row["floor_us"] / row["times_us"][name], title)


def ratios(result: Mapping):
    """The subject's time over each contender's, by workload; None without a row that has both."""
    title = f"time of {SUBJECT} / time of the other (left of 1: {SUBJECT} is faster)"
    return _dots(
        result, lambda row, name: ratio(row, SUBJECT, name) if name != SUBJECT else None, title, log=True
    )


def _dots(result: Mapping, value: Callable[[Mapping, str], float | None], title: str, log: bool = False):
    import matplotlib.ticker
    from matplotlib.figure import Figure

    geometries = list(dict.fromkeys(row["geometry"] for row in result["rows"]))
    rows = sorted(result["rows"], key=lambda row: geometries.index(row["geometry"]))
    several = len(geometries) > 1
    points: dict[str, list[tuple[int, float]]] = {}
    for place, row in enumerate(rows):
        for name in row["times_us"]:
            if name != REST and (found := value(row, name)) is not None:
                points.setdefault(name, []).append((place, found))
    if not points:
        return None
    figure = Figure(figsize=(9, 1.6 + 0.27 * len(rows)), layout="constrained")
    axis = figure.subplots()
    for name in contenders(result):
        if name in points:
            places, values = zip(*points[name])
            axis.plot(
                values,
                places,
                label=label(result, name),
                **style(result, name) | {"linestyle": "", "alpha": 0.85},
            )
    axis.axvline(1.0, color="black", linewidth=0.8)
    names = [
        f"{row['workload']}  [{row['geometry'].split(',')[0]}]" if several else row["workload"]
        for row in rows
    ]
    axis.set_yticks(range(len(rows)), names)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.grid(alpha=0.3)
    axis.set_xlabel(title)
    if log:
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 3, 5, 7)))
        axis.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        axis.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    else:
        axis.set_xlim(left=0)
    axis.set_title(_title(result) if several else f"{_title(result)}\n{geometries[0]}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def _figure(result: Mapping, panels: int):
    from matplotlib.figure import Figure

    columns = min(3, panels)
    lines = -(-panels // columns)
    figure = Figure(figsize=(max(6, 4.4 * columns), 0.9 + 3.6 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis in axes[panels:]:
        axis.remove()
    figure.suptitle(_title(result), fontsize=10)
    return figure, axes[:panels]


def _finished(figure, axes):
    entries: dict[str, object] = {}
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.title.set_fontsize(9)
        lines, names = axis.get_legend_handles_labels()
        entries |= {name: handle for name, handle in zip(names, lines) if name not in entries}
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=4, fontsize=8, frameon=False
    )
    return figure


def _title(result: Mapping) -> str:
    what = f"one decode step of {result['layers']} layers" if result["track"] == "end-to-end" else "attention"
    return f"{what}, {result['device']}"
