"""The command line: the only module that prints. Exit status 0: done; 1: an error in what the user gave; 2: wrong usage."""

import argparse
import io
import json
import shlex
import sys
import time
from pathlib import Path

from rich.console import Console

from specgen import __version__, json_text
from specgen.errors import SpecgenError
from specgen.spec import SCHEMA_TITLE
from specgen.write import write_file

# Text is printed as it is: a path may hold brackets or colons.
_PLAIN = {"highlight": False, "soft_wrap": True, "markup": False, "emoji": False}
_out = Console(**_PLAIN)
_err = Console(stderr=True, **_PLAIN)
_SCHEMA = "spec.schema.json"  # beside every spec that init writes


def main(arguments: list[str] | None = None) -> int:
    """Entry point of `specgen`; returns the exit status."""
    options = _parser().parse_args(arguments)
    options.command = shlex.join(["specgen", *(sys.argv[1:] if arguments is None else arguments)])
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As stderr is: a path may hold what the locale has not.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return options.run(options) or 0
    except SpecgenError as error:
        _err.print(str(error))
        return 1
    except OSError as error:
        _err.print(f"{error.filename or 'specgen'}: {error.strerror or error}")
        return 1
    except KeyboardInterrupt:
        _err.print("interrupted")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specgen", description="Specialized attention kernels from a model's geometry.")
    parser.add_argument("--version", action="version", version=f"specgen {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name, run, summary, *, spec=True, build_dir=False):
        sub = commands.add_parser(name, help=summary, description=summary)
        sub.set_defaults(run=run)
        if spec:
            sub.add_argument("spec", type=Path, help="the spec, a YAML file")
        if build_dir:
            sub.add_argument("--build-dir", type=Path, default=Path("build"), help="where packages are built (build)")
        return sub

    sub = command("init", _init, "write a spec from a model's published config.json, and the schema that editors check it by beside it", spec=False)
    sub.add_argument("config", type=Path, help="config.json, or the model folder that holds it")
    sub.add_argument("-o", "--output", type=Path, help="the spec to write (default: print it)")
    sub.add_argument("--name", help="name of the spec (default: from the model)")
    sub.add_argument("--force", action="store_true", help="overwrite what is there")

    sub = command("build", _build, "generate, compile and pack a spec's kernel wheel", build_dir=True)
    sub.add_argument("--jobs", type=_positive, help="compiler processes (default: the CPUs)")
    sub.add_argument("--sources-only", action="store_true", help="write the package without binaries and wheel")
    sub.add_argument("--pure", action="store_true", help="a py3-none-any wheel: no launch extension, any host, slower launches")

    sub = command("list", _list, "the specializations of a spec, with the sizes of those that are built", build_dir=True)
    sub.add_argument("--why-not", action="store_true", help="also the configurations that a target cannot hold, and why")
    command("check", _check, "whether the generated tree is up to date with the spec", build_dir=True)
    sub = command("explain", _explain, "where a specialization comes from and what uses it", spec=False, build_dir=True)
    sub.add_argument("symbol", help="a kernel's name, as `specgen list` prints it")
    sub.add_argument("spec", type=Path, nargs="*", help="specs to look in (default: specs/*.yaml)")
    sub = command("verify", _verify, "rebuild a wheel from its embedded spec and compare digests", spec=False)
    sub.add_argument("wheel", type=Path, help="a wheel that `specgen build` made")
    sub = command("bench", _bench, "time built packages and installed peers on this machine's GPU", spec=False, build_dir=True)
    sub.add_argument("packages", nargs="*", metavar="PACKAGE", help="import name, folder or spec of a built package")
    sub.add_argument("--package", action="append", default=[], help="one more of them")
    sub.add_argument("--track", choices=("kernels", "end-to-end"), default="kernels", help="attention calls or decode steps (kernels)")
    rows = "standard, lengths, shares, steps, random, random-decode or random-prefill; a glob over the standard rows; or a workload: 'dec b32 k4k'; repeatable"
    sub.add_argument("--rows", action="append", default=[], help=rows)
    sub.add_argument("--peers", type=lambda text: tuple(filter(None, text.split(","))), help="their names, by commas (all)")
    sub.add_argument("--rounds", type=_positive, default=20, help="timed rounds of each row (20)")
    sub.add_argument("--time", type=_positive, dest="seconds", metavar="SECONDS", help="shared among the rows: fewer rounds, 5 at least; none begins after it")
    sub.add_argument("--seed", type=int, default=0, help="of the random data (0)")
    sub.add_argument("--layers", type=_positive, default=32, help="of the model that a decode step runs (32)")
    sub.add_argument("--report", type=Path, metavar="JSON", help="measure nothing: render the result of an earlier run")
    sub.add_argument("-o", "--output", type=Path, default=Path("build/bench"), help="the folder to write (build/bench)")

    sub = command("schema", _schema, "the JSON Schema of specs", spec=False)
    sub.add_argument("-o", "--output", type=Path, help="file to write (default: print it)")
    command("targets", _targets, "the GPUs that a spec may name", spec=False)
    _tune_arguments(command("tune", _tune, "measure candidate kernels of a spec on GPUs, into a store", spec=False, build_dir=True))
    return parser


def _tune_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("spec", type=Path, nargs="?", help="the spec, a YAML file; --bundle stands in for it")
    stage = sub.add_mutually_exclusive_group()
    stage.add_argument("--compile-only", action="store_true", help="make the bundle of candidates; needs no GPU")
    stage.add_argument("--measure-only", action="store_true", help="measure the bundle that was made before; needs no Triton")
    stage.add_argument("--stale", action="store_true", help="list what must be measured again: another kernel, another Triton")
    stage.add_argument("--export", action="store_true", help="write the measurements of the spec as JSON Lines, for git")
    sub.add_argument("--bundle", type=Path, help="folder of the bundle to measure (BUILD_DIR/<spec>/tuning)")
    sub.add_argument("--store", type=Path, help="file of the measurements (measurements.sqlite beside the bundle)")
    sub.add_argument("--import", dest="imported", type=Path, action="append", metavar="FILE", help="first add a JSON Lines file to the store")
    sub.add_argument("--data", type=Path, help="folder for --export, a file per GPU (default: one file beside the spec)")
    some = sub.add_argument_group("what to try")
    some.add_argument("--target", dest="targets", action="append", help="a target of the spec (all); may be given again")
    some.add_argument("--only", action="append", metavar="GLOB", help="kernels by name, such as 'decode_*'; may be given again")
    some.add_argument("--candidates", dest="most", type=_positive, help="at most so many per family and bound on query rows, by chance")
    some.add_argument("--max-registers", type=_positive, action="append", help="also with this bound for a thread (NVIDIA)")
    some.add_argument("--step", type=lambda text: _positive(text, 2), help="factor between neighbouring batches of the grid (4)")
    some.add_argument("--trace", type=Path, metavar="FILE", help="JSON Lines of real batches, in place of the grid")
    some.add_argument("--jobs", type=_positive, help="compiler processes (the CPUs)")
    how = sub.add_argument_group("how to measure")
    how.add_argument("--time", type=_positive, metavar="SECONDS", help="end after about so long; the next run goes on")
    how.add_argument("--search", help="auto, grid, tpe, nsga or random (auto: grid, or tpe where there are many)")
    how.add_argument("--objective", help="what a sampler looks for: mean (over all batches) or best (of one)")
    how.add_argument("--rounds", type=_positive, help="timings of a trial (10); the best are timed again, three times as often")
    how.add_argument("--trial-time", dest="trial_s", type=_positive, metavar="SECONDS", help="a trial that takes longer hangs (60)")
    how.add_argument("--seed", type=int, help="of choices by chance, samplers and tensors (0)")
    how.add_argument("--executor", help="local, or dask://HOST:PORT with a worker per GPU (local)")
    how.add_argument("--gpus", type=lambda text: tuple(text.split(",")), help="of a local executor, such as 0,1 (all that are visible)")


def _positive(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"needs an integer of at least {least}, got {text}")
    return int(text)


def _write(path: Path | None, text: str) -> None:
    if path is None:
        _out.file.write(text)
        return
    write_file(path, text)
    _out.print(f"wrote {path}")


def _init(options) -> None:
    from specgen.hf import import_config

    if options.output and options.output.name == _SCHEMA:
        raise SpecgenError(f"{options.output}: is the name of the schema beside a spec; needs another name")
    if options.output and not options.force:
        if options.output.is_file():
            raise SpecgenError(f"{options.output}: exists; pass --force to overwrite it")
        _refuse_foreign_schema(options.output.with_name(_SCHEMA))
    name = options.name or (options.output.stem if options.output else None)
    text = import_config(options.config, name=name, schema=_SCHEMA if options.output else None)
    _write(options.output, text)
    if options.output:
        _write(options.output.with_name(_SCHEMA), _schema_text())


def _refuse_foreign_schema(path: Path) -> None:
    """A schema that an earlier specgen wrote is replaced without a word, nothing else is."""
    if not path.is_file():
        return
    try:
        ours = str(json_text.read(path)["title"]).startswith(SCHEMA_TITLE)
    except (SpecgenError, KeyError, TypeError):
        ours = False
    if not ours:
        raise SpecgenError(f"{path}: init writes the schema of specs there, and this is none; pass --force to overwrite it")


def _cache():
    from specgen.cache import Cache

    return Cache(warn=_warn)


def _warn(message: str) -> None:
    _err.print(f"warning: {message}")


def _progress():
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    # Without a terminal it would leave an empty line in the log.
    return Progress(*columns, console=_err, transient=True, disable=not _err.is_terminal)


def _build(options) -> None:
    from specgen import pipeline

    if options.sources_only:
        _out.print(f"wrote {pipeline.build_sources(options.spec, options.build_dir, _cache())}")
        return
    with _progress() as bar:
        task = bar.add_task("compiling", total=None)

        def report(done: int, total: int, symbol: str, arch: str) -> None:
            bar.update(task, completed=done, total=total)

        wheel = pipeline.build(
            options.spec,
            options.build_dir,
            cache=_cache(),
            workers=options.jobs,
            progress=report,
            warn=_warn,
            pure=options.pure,
        )
    try:
        size = f" ({wheel.stat().st_size / 1e6:.2f} MB)"
    except FileNotFoundError:  # replaced by another build's
        size = ""
    _out.print(f"built {wheel}{size}")


def _tune(options) -> None:
    from specgen import tune_measure

    if options.spec is None and not (options.bundle and options.measure_only):
        raise SpecgenError("tune: needs a spec, or --measure-only with --bundle")
    if options.stale or options.export:
        _tuned(options)
        return
    where = tune_measure.Where(**_given(options, "executor", "gpus"))
    plan = tune_measure.Plan(**_given(options, "search", "objective", "rounds", "trial_s", "seed"))
    if options.compile_only and options.trace:
        raise SpecgenError(f"--trace {options.trace}: says what to measure, which --compile-only does not; give it to the run that does")
    if not options.compile_only:  # errors now, not after all was compiled
        tune_measure.local_gpus(where)
        if options.trace and options.spec:
            tune_measure.check_trace(options.trace, options.spec)
    bundles = [] if options.measure_only else _compile_candidates(options)
    if not options.compile_only:
        bundles = bundles or tune_measure.find(options.spec, options.build_dir, options.bundle)
        _measure_candidates(options, bundles, where, plan)


def _given(options, *names: str) -> dict:
    """The options that were given, by name; of the others the default is stated where they are used."""
    values = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _compile_candidates(options) -> list:
    from specgen import tune_compile

    choice = tune_compile.Choice(**_given(options, "targets", "only", "most", "max_registers", "step", "seed"))
    with _progress() as bar:
        rest = {"cache": _cache(), "workers": options.jobs, "report": _reporter(bar), "warn": _warn}
        bundles = tune_compile.make_bundles(options.spec, options.build_dir, choice, **rest)
    for bundle in bundles:
        _out.print(f"made {bundle.folder}: {bundle.summary}")
    return bundles


def _measure_candidates(options, bundles: list, where, plan) -> None:
    from specgen import tune_measure

    with _progress() as bar:
        summaries = tune_measure.measure(
            bundles,
            options.store or tune_measure.store_beside(bundles),
            where=where,
            plan=plan,
            seconds=options.time,
            **_given(options, "trace", "imported"),
            report=_reporter(bar, options.time),
            conclude=lambda summary: _out.print(str(summary)),
        )
    if not all(summary.complete for summary in summaries):
        _out.print("the time is over; the next run goes on from here")


def _reporter(bar, seconds: float | None = None):
    """Shows on a progress bar what is being done, one kind of work at a time; with `seconds`, what is left of a budget."""
    ends = None if seconds is None else time.monotonic() + seconds
    tasks: dict = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in tasks:
            for other in tasks.values():
                bar.update(other, visible=False)
            tasks[what] = bar.add_task(what)
        task = tasks[what]
        left = "" if ends is None else f", {max(0, ends - time.monotonic()):.0f} s left"
        bar.update(task, completed=done, total=total, description=what + left)

    return report


def _tuned(options) -> None:
    from specgen import tune_data

    more = _given(options, "store", "imported")
    if options.export:
        written = tune_data.export(options.spec, options.build_dir, **more, **_given(options, "data"))
        for path, count in written.items():
            _out.print(f"wrote {path}: {count} measurements")
        if not written:
            _out.print("nothing to export: no measurement is of the kernels and the Triton of now")
        return
    lines, count = tune_data.stale(options.spec, options.build_dir, **more)
    for line in lines:
        _out.print(line)
    if not count:
        _out.print(f"no measurements of the geometries of {options.spec}")
    elif not lines:
        _out.print("every measurement is of the kernels and the Triton of now")


def _list(options) -> None:
    from specgen import pipeline

    generated, root = pipeline.generate_as_built(options.spec, options.build_dir, _cache())
    expansion = generated.expansion
    built = pipeline.built_sizes(root, generated.loaded.spec.digest)
    rows = 0
    for symbol in expansion.variants:
        for arch in expansion.archs(symbol):
            rows += 1
            _out.print(f"{symbol:72s} {arch:7s} {built.get((symbol, arch), 'not built')}")
    _out.print(f"{len(expansion.variants)} specializations, {rows} binaries")
    if options.why_not:
        for rejection in expansion.rejections:
            _out.print(f"not {rejection.symbol} for {rejection.target}: {rejection.reason}")
        if not built:
            _out.print(f"what a compiled kernel needs too much of, `specgen build {shlex.quote(str(options.spec))}` finds out")
        elif not expansion.rejections:
            _out.print("every target holds the preferred configurations")


def _check(options) -> int:
    from specgen import pipeline

    differences = pipeline.check(options.spec, options.build_dir, _cache())
    for line in differences:
        _out.print(line)
    if not differences:
        _out.print("up to date")
    return 1 if differences else 0


def _explain(options) -> None:
    from specgen import provenance

    _out.print(provenance.explain(options.symbol, options.spec or None, options.build_dir))


def _verify(options) -> int:
    from specgen import pipeline

    differences = pipeline.verify(options.wheel)
    for difference in differences:
        _out.print(str(difference))
    if not differences:
        _out.print(f"{options.wheel.name}: every file is what its spec builds")
    return 1 if differences else 0


def _bench(options) -> None:
    from specgen.bench import output

    if options.report:
        result = output.read(options.report)
    else:
        try:
            from specgen.bench.run import Plan, bench
        except ModuleNotFoundError as error:
            raise SpecgenError(f"bench: {error.name} is not installed; pip install 'specgen[bench]'") from error
        result = bench(Plan.of(options), _out.print)
    for path in output.write(result, options.output):
        _out.print(f"wrote {path}")


def _schema_text() -> str:
    from specgen.spec import json_schema

    return json.dumps(json_schema(), indent=2) + "\n"


def _schema(options) -> None:
    _write(options.output, _schema_text())


def _targets(options) -> None:
    from specgen.target import load_targets

    for target in load_targets().values():
        _out.print(
            f"{target.id:14s} {target.arch:7s} {target.multiprocessors:4d} multiprocessors "
            f"{target.shared_memory_per_block:7d} B shared per block {target.memory_bandwidth:6.0f} GB/s  {target.name}"
        )


if __name__ == "__main__":
    sys.exit(main())
