"""The process that runs Triton: takes jobs, answers with binaries or reasons.

Started by `aot` with a private folder; everything that it or Triton writes stays there. Whatever Triton prints (whole PTX
files on an error) goes to the log, standard error, where the reason of a failure is looked for.
"""

import contextlib
import importlib.util
import re
import sys
from hashlib import sha256
from pathlib import Path
from types import ModuleType

from specgen import ptx, resources
from specgen.binary import Binary, CompileJob, Failed, Refused
from specgen.child import serve
from specgen.descriptors import wrong_descriptors
from specgen.errors import BuildError
from specgen.toolchain import assembler, is_nvidia

_PTXAS_SHARED = re.compile(r"uses too much shared data \(0x([0-9a-f]+) bytes, 0x([0-9a-f]+) max\)")
_ERROR_LINE = re.compile(
    r"\b(?:error|fatal)\b\s*:\s*(.+)|^(LLVM ERROR.*|.*Assertion .* failed.*)", re.IGNORECASE
)


def main(folder: str) -> None:
    """Answers jobs until standard input ends."""
    serve(Path(folder), lambda job: answer_job(job, Path(folder)))


def answer_job(job: CompileJob, folder: Path) -> Binary | Refused | Failed:
    """The binary of `job`, or why it is too large, or the line that says what failed."""
    try:
        return _compile(job, folder)
    except BuildError as error:
        return Failed(f"{job.title}: {error}")
    except Exception as error:  # any of Triton's: its classes are many and not all public
        sys.stderr.flush()
        sys.stdout.flush()
        log = (folder / "log").read_text(errors="replace")
        needed = _shared_needed(error, log)
        if needed:
            return Refused(resources.shared_message(job, needed))
        return Failed(f"{job.title}: {first_useful_line(error, log)}")


def first_useful_line(error: BaseException, log: str) -> str:
    """What is wrong, in one line: Triton's message with the source line, or the first error in its log."""
    root = error
    while root.__cause__ is not None and hasattr(
        root.__cause__, "node"
    ):  # from the call into a helper to the helper
        root = root.__cause__
    place = _place(root)
    message = getattr(root, "error_message", None) or str(root)
    if type(root).__name__ == "PTXASError" or "PassManager" in message or not message.strip():
        for text in (message, log):
            for each in text.splitlines():
                found = _ERROR_LINE.search(each)
                if found:
                    return place + (found.group(1) or found.group(2)).strip()[:300]
    lines = [each.strip() for each in message.splitlines() if each.strip()]
    if not lines:
        return f"{place}{type(root.__cause__ or root).__name__}"
    named = "" if hasattr(root, "node") else f"{type(root).__name__}: "
    return f"{place}{named}{lines[0]}"[:300]


def _place(error: BaseException) -> str:
    """The line of source that Triton refused, such as "in 's = tl.dot(q, k)': "."""
    source, line = getattr(error, "src", None), getattr(getattr(error, "node", None), "lineno", 0)
    lines = source.splitlines() if isinstance(source, str) else []
    return f"in {lines[line - 1].strip()!r}: " if 0 < line <= len(lines) else ""


def _shared_needed(error: Exception, log: str) -> int:
    if type(error).__name__ == "OutOfResources" and getattr(error, "name", "") == "shared memory":
        return error.required
    found = _PTXAS_SHARED.search(f"{error}\n{log}")
    return int(found.group(1), 16) if found else 0


def _compile(job: CompileJob, folder: Path) -> Binary | Refused:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    nvidia = is_nvidia(job.arch)
    target = (
        GPUTarget("cuda", int(job.arch.removeprefix("sm_")), 32) if nvidia else GPUTarget("hip", job.arch, 64)
    )
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages, **dict(job.options)}
    rewritings = ptx.taken(options)
    unknown = options.keys() - type(make_backend(target).parse_options({})).__dataclass_fields__.keys()
    if unknown:
        raise BuildError(
            f"Triton {triton.__version__} has no option {', '.join(sorted(unknown))} for {job.arch}"
        )

    function = getattr(_load(job, folder), job.symbol, None)
    if not isinstance(function, triton.JITFunction):
        raise BuildError(f"the module defines no @triton.jit or @gluon.jit function {job.symbol}")
    names = [name for name, _ in job.signature]
    if list(function.arg_names) != names:
        raise BuildError(
            f"the function takes ({', '.join(function.arg_names)}), the signature has ({', '.join(names)})"
        )

    attributes = {(index,): [["tt.divisibility", divisor]] for index, divisor in job.divisibility}
    kind = GluonASTSource if isinstance(function, GluonJITFunction) else ASTSource
    source = kind(function, dict(job.signature), constexprs={}, attrs=attributes)
    with _rewritten(rewritings) if rewritings else contextlib.nullcontext():
        compiled = triton.compile(source, target=target, options=options)
    metadata = compiled.metadata
    data = compiled.asm["cubin" if nvidia else "hsaco"]
    if nvidia:
        _check_parameters(job, compiled.asm["ptx"])
        # Only these products have descriptors, and disassembling takes most of a second.
        listing = resources.machine_code(data) if "wgmma" in compiled.asm["ptx"] else None
        if listing and (wrong := wrong_descriptors(listing)):
            return Refused(f"ptxas lost what a matrix product is to read: {wrong[0]}")
        usage = resources.read_cubin(data, metadata.name, listing)
    else:
        usage = resources.read_hsaco(data, metadata.name, compiled.asm["amdgcn"])
    block = {
        "num_threads": metadata.num_warps * target.warp_size,
        "shared_bytes": metadata.shared,
        "registers": usage.registers,
        "tensor_memory_columns": getattr(metadata, "tmem_size", 0) or 0,
    }
    return Binary(
        data=data,
        extension="cubin" if nvidia else "hsaco",
        function=metadata.name,
        **block,
        spill_bytes=usage.spill_bytes,
        main_loop_spills=usage.main_loop_spills,
        occupancy=resources.occupancy(job.arch, **block),
        stack_bytes=usage.stack_bytes,
        scalar_spills=usage.scalar_spills,
        scratch_bytes=(getattr(metadata, "global_scratch_size", 0) or 0)
        + (metadata.profile_scratch_size or 0),
        assembler=assembler(job.arch),
    )


@contextlib.contextmanager
def _rewritten(names: list[str]):
    """Within it, PTX is assembled as the rewritings of these names leave it."""
    from triton import knobs

    def hook(backend=None, stages=None, *_):
        if stages is None:  # Triton asks what to add to its cache's key
            return ",".join(names), ",".join(names)
        assemble = stages["cubin"]
        stages["cubin"] = lambda text, metadata: assemble(ptx.rewritten(text, names), metadata)

    before, knobs.runtime.add_stages_inspection_hook = knobs.runtime.add_stages_inspection_hook, hook
    try:
        yield
    finally:
        knobs.runtime.add_stages_inspection_hook = before


def _check_parameters(job: CompileJob, ptx: str) -> None:
    """BuildError unless the compiled kernel takes the parameters that the launcher will pass: a matter of Triton's version."""
    entry = ptx[ptx.index(".entry") :]
    taken = tuple(
        int(count) if count else int(bits) // 8
        for bits, count in re.findall(r"\.param\b.*\.[bus](8|16|32|64)\b[^\[\n,)]*(?:\[(\d+)\])?", entry[: entry.index(")")])
    )
    if job.parameters and taken != job.parameters:
        raise BuildError(f"the kernel takes parameters of {taken} bytes, the launcher passes {job.parameters}")


def _load(job: CompileJob, folder: Path) -> ModuleType:
    """The job's module, imported from a file: Triton reads the source of a function through `inspect`."""
    modules = folder / "modules" / sha256(job.source.encode()).hexdigest()
    modules.mkdir(parents=True, exist_ok=True)
    path = modules / f"{job.symbol}.py"
    path.write_text(job.source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(job.symbol, path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise BuildError(f"line {error.lineno}: {error.msg}") from error
    return module
