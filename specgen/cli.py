"""The command line: the only module that prints. Exit status 0: done; 1: an error in what the user gave; 2: wrong usage."""

import argparse
import io
import json
import os
import shlex
import sys
from pathlib import Path

from rich.console import Console

from specgen import __version__
from specgen.errors import SpecgenError

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

    sub = command("init", _init, "write a spec from a model's published config.json", spec=False)
    sub.add_argument("config", type=Path, help="config.json, or the model folder that holds it")
    sub.add_argument("-o", "--output", type=Path, help="the spec to write (default: print it)")
    sub.add_argument("--name", help="name of the spec (default: from the model)")
    sub.add_argument("--force", action="store_true", help="overwrite an existing spec")

    sub = command("build", _build, "generate, compile and pack a spec's kernel wheel", build_dir=True)
    sub.add_argument("--jobs", type=_positive, help="compiler processes (default: the CPUs)")
    sub.add_argument("--sources-only", action="store_true", help="write the package without binaries and wheel")
    sub.add_argument("--pure", action="store_true", help="a py3-none-any wheel: no launch extension, any host, slower launches")

    sub = command("list", _list, "the specializations of a spec, with the sizes of those that are built", build_dir=True)
    sub.add_argument("--why-not", action="store_true", help="also the configurations that a target cannot hold, and why")
    command("check", _check, "whether the generated tree is up to date with the spec", build_dir=True)
    sub = command("explain", _explain, "where a specialization comes from and what uses it", spec=False)
    sub.add_argument("symbol", help="a kernel's name, as `specgen list` prints it")
    sub.add_argument("spec", type=Path, nargs="*", help="specs to look in (default: specs/*.yaml)")
    sub = command("verify", _verify, "rebuild a wheel from its embedded spec and compare digests", spec=False)
    sub.add_argument("wheel", type=Path, help="a wheel that `specgen build` made")
    sub = command("bench", _bench, "time built packages and installed peers on this machine's GPU", spec=False, build_dir=True)
    sub.add_argument("packages", nargs="*", metavar="PACKAGE", help="import name, folder or spec of a built package")
    sub.add_argument("--package", action="append", default=[], help="one more of them")
    sub.add_argument("--track", choices=("kernels", "end-to-end"), default="kernels", help="attention calls or decode steps (kernels)")
    rows = "standard, lengths, shares, steps or random; a glob over the standard rows; or a workload: 'dec b32 k4k'; repeatable"
    sub.add_argument("--rows", action="append", default=[], help=rows)
    sub.add_argument("--peers", type=lambda text: tuple(filter(None, text.split(","))), help="their names, by commas (all)")
    sub.add_argument("--rounds", type=_positive, default=20, help="timed rounds of each row (20)")
    sub.add_argument("--time", type=_positive, dest="seconds", metavar="SECONDS", help="begin no row after so many seconds")
    sub.add_argument("--seed", type=int, default=0, help="of the random data (0)")
    sub.add_argument("--layers", type=_positive, default=32, help="of the model that a decode step runs (32)")
    sub.add_argument("--report", type=Path, metavar="JSON", help="measure nothing: render the result of an earlier run")
    sub.add_argument("-o", "--output", type=Path, default=Path("build/bench"), help="the folder to write (build/bench)")

    sub = command("schema", _schema, "the JSON Schema of specs", spec=False)
    sub.add_argument("-o", "--output", type=Path, help="file to write (default: print it)")
    command("targets", _targets, "the GPUs that a spec may name", spec=False)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs an integer of at least 1, got {text}")
    return int(text)


def _write(path: Path | None, text: str) -> None:
    if path is None:
        _out.file.write(text)
        return
    if path.is_dir():
        raise SpecgenError(f"{path}: is a folder; needs the name of a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    _out.print(f"wrote {path}")


def _init(options) -> None:
    from specgen.hf import import_config

    if options.output and options.output.name == _SCHEMA:
        raise SpecgenError(f"{options.output}: is the name of the schema beside a spec; needs another name")
    if options.output and options.output.exists() and not options.force:
        raise SpecgenError(f"{options.output}: exists; pass --force to overwrite it")
    name = options.name or (options.output.stem if options.output else None)
    text = import_config(options.config, name=name, schema=_SCHEMA if options.output else None)
    _write(options.output, text)
    if options.output:
        _write(options.output.with_name(_SCHEMA), _schema_text())


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
    _out.print(f"built {wheel} ({wheel.stat().st_size / 1e6:.2f} MB)")


def _list(options) -> None:
    from specgen import pipeline

    generated, root = pipeline.generate_as_built(options.spec, options.build_dir, _cache())
    expansion = generated.expansion
    built = _built_sizes(root / "manifest.json", generated.loaded.spec.digest)
    rows = 0
    for symbol in expansion.variants:
        for arch in expansion.archs(symbol):
            rows += 1
            _out.print(f"{symbol:72s} {arch:7s} {built.get((symbol, arch), 'not built')}")
    _out.print(f"{len(expansion.variants)} specializations, {rows} binaries")
    if options.why_not:
        for rejection in expansion.rejections:
            _out.print(f"not {rejection.symbol} for {rejection.target}: {rejection.reason}")
        if not expansion.rejections:
            _out.print("every target holds the preferred configurations")


def _built_sizes(path: Path, digest: str) -> dict[tuple[str, str], str]:
    """(symbol, arch) -> sizes, from a manifest that may be missing, damaged or another spec's: then nothing is built."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        variants = content["variants"] if content["spec"]["sha256"] == digest else {}
        return {
            (symbol, arch): f"{b['registers']:4d} registers {b['shared_bytes']:7d} B shared {b['spill_bytes']:4d} B spilled"
            for symbol, variant in variants.items()
            for arch, b in variant["binaries"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


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

    _out.print(provenance.explain(options.symbol, options.spec or None))


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
