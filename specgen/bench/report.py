"""A result as Markdown: times for each geometry, ratios, host times, errors, what is missing. Pure."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from statistics import geometric_mean

from specgen.bench.results import REST, SUBJECT, contenders, ratio
from specgen.errors import SpecgenError

KINDS = {"decode": ("dec", "spec"), "prefill": ("pre", "chunk", "mixed")}
_SETS = {
    "held_out": "the tree's choice, on batches left out of its fit",
    "training": "the tree's choice, on those of its fit",
    "default": "the untuned choice, on those",
}
_NEEDED = ("device", "software", "peers", "command", "track", "rows")


def check(result: object) -> dict:
    """The result, if it has what reports read; SpecgenError if not."""
    missing = [name for name in _NEEDED if name not in result] if isinstance(result, dict) else list(_NEEDED)
    if missing:
        raise SpecgenError(f"is no result of `specgen bench`: it lacks {', '.join(missing)}")
    return result


def markdown(result: Mapping) -> str:
    """The whole report."""
    end_to_end = result["track"] == "end-to-end"
    title = f"One decode step of {result['layers']} layers" if end_to_end else "Attention"
    lines = [f"# {title} on {result['device']}", "", *_header(result)]
    for geometry in dict.fromkeys(row["geometry"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["geometry"] == geometry]
        lines += ["", f"## {geometry}", "", *_times(result, rows)]
    if result["rows"]:
        lines += ["", "## Against each", "", *_ratios(result)]
        lines += ["", "## Contenders", "", *_contenders(result)]
    lines += _host(result) + _regret(result) + _missing(result)
    return "\n".join(lines) + "\n"


def _header(result: Mapping) -> list[str]:
    software = ", ".join(f"{name} {version}" for name, version in result["software"].items())
    lines = [f"`{result['command']}`", "", f"{software}; {_rounds(result)}."]
    if "read_GBs" in result:
        rates = {name: f"{result[name]:.0f}" for name in ("read_GBs", "copy_GBs", "matmul_TFLOPs")}
        lines[-1] += (
            f" Measured beside the rows: reads {rates['read_GBs']} GB/s, copies {rates['copy_GBs']} GB/s, "
            f"bf16 products {rates['matmul_TFLOPs']} TFLOP/s, an empty graph {result['empty_us']:.1f} us (in "
            "every time)."
        )
    return [
        *lines,
        "",
        "Median GPU time in microseconds; the best is bold. `floor` is the larger of bytes / read bandwidth "
        "and operations / matrix rate; `of floor` is floor / specgen.",
    ]


def _rounds(result: Mapping) -> str:
    most = result.get("rounds")
    fewest = min((row["rounds"] for row in result["rows"] if row.get("rounds")), default=most)
    return f"{most} rounds" if fewest == most else f"{fewest} to {most} rounds, as the time allowed"


def _table(head: list[str], body: Iterable[Iterable[str]], words: int = 1) -> list[str]:
    """Markdown; the first `words` columns are words, the others numbers."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *body)]


def number(value: float) -> str:
    """A time with about three or four digits."""
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _times(result: Mapping, rows: list[Mapping]) -> list[str]:
    names = contenders(result, rows)

    def cells(row: Mapping) -> Iterable[str]:
        times = row["times_us"]
        yield row["workload"]
        yield number(row["floor_us"])
        for name in names:
            text = number(times[name]) if name in times else "-"
            yield f"**{text}**" if name in times and times[name] == _best(times) else text
        yield f"{row['floor_us'] / times[SUBJECT]:.2f}" if SUBJECT in times else "-"

    return _table(["workload", "floor", *names, "of floor"], map(cells, rows))


def _best(times: Mapping[str, float]) -> float:
    return min(time for name, time in times.items() if name != REST)


def _ratios(result: Mapping) -> list[str]:
    others = [name for name in contenders(result) if name not in (SUBJECT, REST)]

    def best(row: Mapping) -> float | None:
        found = (ratio(row, SUBJECT, name) for name in others)
        return max((value for value in found if value is not None), default=None)

    def cells(name: str, ratio_of: Callable[[Mapping], float | None]) -> Iterable[str]:
        yield f"{SUBJECT} / {name}"
        for kinds in KINDS.values():
            rows = [row for row in result["rows"] if row["workload"].split()[0] in kinds]
            found = [(value, row["workload"]) for row in rows if (value := ratio_of(row)) is not None]
            worst, where = max(found, default=(None, None))
            yield f"{geometric_mean(value for value, _ in found):.3f} ({len(found)})" if found else "-"
            yield f"{worst:.3f} ({where})" if found else "-"
            yield str(sum(value > 1 for value, _ in found)) if found else "-"

    columns = ("geometric mean (rows)", "worst", "rows above 1.00")
    head = ["ratio of times", *(f"{kind}: {what}" for kind in KINDS for what in columns)]
    lines = [list(cells(name, partial(ratio, name=SUBJECT, other=name))) for name in others]
    if len(others) > 1:
        lines.append(list(cells("the best of them", best)))
    return _table(head, lines)


def _contenders(result: Mapping) -> list[str]:
    def cells(name: str) -> Iterable[str]:
        facts = result["peers"][name]
        rows = [row for row in result["rows"] if name in row["times_us"]]
        spreads = [
            (row["spread_us"][name][1] - row["spread_us"][name][0]) / row["times_us"][name] for row in rows
        ]
        errors = [row["error"][name] for row in rows if name in row["error"]]
        yield from (name, facts["title"], facts.get("version", ""))
        yield f"{max(errors):.1e}" if errors else "-"
        yield f"{100 * max(spreads):.1f} %"
        yield ", ".join(_ways(rows, name))

    head = ["name", "what", "version", "largest error", "largest spread (p10 to p90)", "best way (rows)"]
    return _table(head, map(cells, contenders(result)), words=3)


def _ways(rows: list[Mapping], name: str) -> list[str]:
    found: dict[str, int] = {}
    for row in rows:
        if ways := row["ways"].get(name):
            best = min(ways, key=ways.get)
            found[best] = found.get(best, 0) + 1
    return [f"{way} ({count})" for way, count in found.items()]


def _host(result: Mapping) -> list[str]:
    rows = [row for row in result["rows"] if row["host_us"]]
    names = [name for name in contenders(result) if any(name in row["host_us"] for row in rows)]
    if not rows:
        return []
    body = [
        [
            row["workload"],
            *(f"{row['host_us'][name]:.1f}" if name in row["host_us"] else "-" for name in names),
        ]
        for row in rows
    ]
    return ["", "## Host time of one call, us", "", *_table(["workload", *names], body)]


def _regret(result: Mapping) -> list[str]:
    def cells(package: str, tree: Mapping, name: str) -> Iterable[str]:
        found = tree[name]
        unmeasured = f" ({found['unmeasured']} more without a time)" if found["unmeasured"] else ""
        yield from (f"{package}, {tree['layer']}, {tree['arch']}", tree["measured_on"], _SETS[name])
        yield f"{found['workloads']}{unmeasured}"
        yield f"{found['geometric_mean']:.3f}"
        yield f"{found['worst']:.3f} ({found['worst_workload']})"

    trees = [(package, tree) for package, found in result.get("regret", {}).items() for tree in found]
    if not trees:
        return []
    text = "Times over those of each batch's best schedule, as measured when the dispatch trees were made:"
    head = ["tree", "measured on", "what is launched", "batches", "geometric mean", "worst"]
    body = [cells(package, tree, name) for package, tree in trees for name in _SETS if name in tree]
    return ["", "## Regret", "", text, "", *_table(head, body, words=3)]


def _missing(result: Mapping) -> list[str]:
    lines = [f"- {name}: {facts['reason']}" for name, facts in result["peers"].items() if "reason" in facts]
    notes: dict[tuple[str, str], list[str]] = {}
    for row in result["rows"]:
        for name, note in row["notes"].items():
            notes.setdefault((name, note), []).append(row["workload"])
    lines += [f"- {name} ({', '.join(dict.fromkeys(rows))}): {note}" for (name, note), rows in notes.items()]
    lines += [f"- skipped {name}: {reason}" for name, reason in result.get("skipped", {}).items()]
    return ["", "## Missing", "", *lines] if lines else []
