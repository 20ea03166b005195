"""Mutation testing: changes the code at random places, one at a time, and lists the changes that no test notices.

A seed draws the places in src/moesaic (kernels for Triton aside: they need a GPU) and what is put there: another
comparison or arithmetic operator, ``and`` for ``or``, a condition without its ``not``, a constant that is one more or
less, ``max`` for ``min``, ``mean`` for ``sum``. Docstrings, annotations, ``__all__``, the texts of errors and constants
that only speed depends on (``SPEED_ONLY``) stay.

Each mutant is made in a copy of the tree. The tests that run the changed line are started there, the nearest and
quickest first; the first that fails kills the mutant. Which test runs which line is recorded once, in
.cache/mutate.json.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, cast

ROOT = Path(__file__).resolve().parents[1]
TOOLS = Path(__file__).resolve().parent

OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add, ast.Div),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
NAMES = {"min": "max", "sum": "mean", "amin": "amax", "argmin": "argmax", "any": "all", "floor": "ceil"}
NAMES |= {new: old for old, new in NAMES.items()}
GPU_ONLY = ("triton", "tile_sizes")
"""Parts of the paths of modules that run on GPUs alone."""

SPEED_ONLY = {
    "data/decoded_cache.py": ("_BLOCK_IMAGES", "_LOG_INTERVAL", "_MAX_WORKERS"),
    "cli/explain.py": ("_LOG_INTERVAL",),
    "models/deepmoe/frozen_embedding.py": ("SMALL_MAP",),
    "models/wide_resnet/thin_conv.py": ("_MAX_CHANNELS", "_MAX_OUT_CHANNELS"),
    "ops/channel/cpu_block_conv.py": ("LARGE_MAP", "MANY_WEIGHTS", "MAX_UNFOLDED"),
    "ops/channel/costs.py": ("CPU_COSTS",),
    "ops/channel/gathered_conv.py": ("FEW_PIXELS", "LARGE_BLOCK", "MANY_PIXELS", "MANY_WEIGHTS", "MAX_UNFOLDED"),
    "ops/channel/workspace.py": ("MAX_PLANS", "MAX_VALUES"),
    "ops/patch/cpu_inference.py": ("_CHUNK_VALUES",),
    "report/expert_figures.py": ("_BLOCK",),
    "report/progress_bars.py": ("_INTERVAL",),
    "training/batches.py": ("_MAX_PREPARED_IMAGES", "_MAX_PREPARED_VALUES"),
    "training/fit.py": ("_IMAGE_MEMORY",),
    "training/trainer.py": ("_EVAL_BATCH_SIZE", "_LOG_SECONDS"),
    "papers/engine/trial_datasets.py": ("_BLOCK",),
    "papers/chen2022/data/rotated_cifar.py": ("_CHUNK",),
    "papers/chen2022/image_training.py": ("_EVAL_BATCH_SIZE",),
    "papers/chen2022/theory/smoothing.py": ("_BLOCK",),
    "papers/chen2022/trial_training.py": ("_BLOCK", "_CHECK_EVERY", "_CPU_FLOATS", "_CPU_SAMPLES"),
    "papers/chowdhury2023/data/cifar_mosaics.py": ("_CHUNK",),
    "papers/chowdhury2023/trial_training.py": ("_CPU_WORK",),
    "papers/chowdhury2023/two_layer_networks.py": ("_MAX_BYTES",),
}
"""Constants that are left alone: they set how much is computed at a time, which of several equal ways is taken, or how
often progress is logged. No result depends on them, and no test may depend on speed."""

_FILES = 40  # of tests run at a time to find out their lines, so that little is lost where this is interrupted

QUIET_CALLS = {"log", "warn", "warning", "print", "print_help", "arg", "field", "TypeVar", "cast", "log_line"}
"""Calls whose arguments are text for people, or no code that runs."""


@dataclass(frozen=True)
class Mutant:
    """Another expression in the place of one."""

    file: str
    line: int
    last_line: int
    source: str
    """The whole file afterwards."""
    at_import: bool
    """Whether the place runs when the module is imported."""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    def diff(self, before: str) -> str:
        lines = difflib.unified_diff(before.splitlines(), self.source.splitlines(), n=0, lineterm="")
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


@dataclass(frozen=True)
class MutantResult:
    """Whether a test noticed a mutant."""

    place: str
    diff: str
    status: Literal["killed", "timeout", "survived", "no coverage"]
    """"no coverage": no test runs the line, so none can notice; counted as survived."""
    by: str
    seconds: float

    @property
    def survived(self) -> bool:
        return self.status in ("survived", "no coverage")


# ---- places


class _Places(ast.NodeVisitor):
    """Collects the expressions that can be changed, each with its changed copies."""

    def __init__(self, skipped: Sequence[str]) -> None:
        self.skipped = {"__all__", *skipped}
        self.found: list[tuple[ast.AST, ast.AST]] = []
        self._outer: list[ast.AST] = []  # outermost f-string, whose parts have no places of their own in the source

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and "TypeAlias" not in ast.dump(node.annotation):
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        if not names & self.skipped:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        pass

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(part)

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_function  # without decorators and annotations

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in node.body:
            self.visit(part)

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        pass  # for the type checker

    def visit_If(self, node: ast.If) -> None:
        test = ast.unparse(node.test)
        if "TYPE_CHECKING" not in test and "__name__" not in test:
            self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not (isinstance(node.value, ast.Name) and node.value.id in ("Literal", "Annotated", "Callable", "Generic")):
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._outer.append(node)
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.visit(part.value)  # not its format
        self._outer.pop()

    def visit_Compare(self, node: ast.Compare) -> None:
        for i, operator in enumerate(node.ops):
            for new in OPERATORS.get(type(operator), ()):
                self._add(node, ops=[*node.ops[:i], new(), *node.ops[i + 1 :]])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = (ast.JoinedStr, ast.Constant, ast.List, ast.Tuple)
        is_text = any(isinstance(s, texts) and not _is_number(s) for s in (node.left, node.right))
        if not is_text:
            for new in OPERATORS.get(type(node.op), ()):
                self._add(node, op=new())
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._add(node, op=OPERATORS[type(node.op)][0]())
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub) and not isinstance(node.operand, ast.Constant):
            self.found.append((self._place(node), self._mutated(node, node.operand)))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, value=not node.value)
        elif isinstance(node.value, int | float):
            for value in {node.value + 1, node.value - 1 if node.value else 1}:
                self._add(node, value=value)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # an assertion that iterables are equally long
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in QUIET_CALLS:
            return
        if name in NAMES:
            if isinstance(node.func, ast.Attribute):
                self._add(node.func, attr=NAMES[name])
            elif NAMES[name] not in ("mean", "floor", "ceil", "amax", "amin", "argmax", "argmin"):
                self._add(node.func, id=NAMES[name])
        self.generic_visit(node)

    def _place(self, node: ast.AST) -> ast.AST:
        return self._outer[0] if self._outer else node

    def _add(self, node: ast.AST, **fields: Any) -> None:
        new = copy.copy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        self.found.append((self._place(node), self._mutated(node, new)))

    def _mutated(self, node: ast.AST, new: ast.AST) -> ast.AST:
        if not self._outer:
            return new

        class Swap(ast.NodeTransformer):
            def visit(self, other: ast.AST) -> ast.AST:
                return new if other is node else copy.copy(self.generic_visit(_shallow(other)))

        return Swap().visit(self._outer[0])


def _shallow(node: ast.AST) -> ast.AST:
    new = copy.copy(node)
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            setattr(new, name, list(value))
    return new


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def places_of(text: str, skipped: Sequence[str] = ()) -> list[list[tuple[ast.AST, ast.AST]]]:
    """What can be changed in a source: for every place the expression there and those that may stand for it.

    Assignments to the ``skipped`` names stay.
    """
    places = _Places(skipped)
    places.visit(ast.parse(text))
    grouped: dict[Any, list[tuple[ast.AST, ast.AST]]] = {}
    for i, (old, new) in enumerate(places.found):
        grouped.setdefault(i if isinstance(old, ast.JoinedStr) else id(old), []).append((old, new))
    return list(grouped.values())


def mutate(file: str, text: str, old: ast.AST, new: ast.AST) -> Mutant | None:
    """The file with one expression in the place of another; None where that makes no difference.

    >>> for old, new in places_of("y = 2 * x")[0]:
    ...     print(mutate("a.py", "y = 2 * x", old, new).source)
    y = (2 + x)
    y = (2 / x)
    """
    data, position = text.encode(), cast(ast.expr, old)
    lines = data.splitlines(keepends=True)
    begin = sum(map(len, lines[: position.lineno - 1])) + position.col_offset
    last = position.end_lineno or position.lineno
    end = sum(map(len, lines[: last - 1])) + (position.end_col_offset or 0)
    written = ast.unparse(new)
    if isinstance(new, ast.BinOp | ast.BoolOp | ast.Compare | ast.UnaryOp):
        written = f"({written})"
    source = (data[:begin] + written.encode() + data[end:]).decode()
    tree = ast.parse(text)
    try:
        same = ast.dump(tree) == ast.dump(ast.parse(source))
    except SyntaxError:
        return None
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    called = any(each.body[0].lineno <= position.lineno <= (each.end_lineno or 0) for each in functions)
    return None if same else Mutant(file, position.lineno, last, source, at_import=not called)


def draw_mutants(files: Sequence[str], count: int, seed: int, root: Path = ROOT) -> list[Mutant]:
    """``count`` places of the files, each with one of its possible changes."""
    rng = random.Random(seed)
    texts = {file: (root / file).read_text("utf-8") for file in files}
    places = [
        (file, place)
        for file, text in texts.items()
        for place in places_of(text, SPEED_ONLY.get(file.removeprefix("src/moesaic/"), ()))
    ]
    rng.shuffle(places)
    found = (mutate(file, texts[file], *rng.choice(place)) for file, place in places)
    return list(islice(filter(None, found), count))


# ---- tests


@dataclass(frozen=True)
class TestMap:
    """Which tests run which lines."""

    seconds: dict[str, float]
    by_line: dict[str, dict[int, list[str]]]
    starting_processes: list[str]
    importers: dict[str, list[str]]
    """Of each file, those that import from it."""

    def tests_for(self, mutant: Mutant) -> list[str]:
        """Those that run the line, the nearest and quickest first."""
        here = self.by_line.get(mutant.file, {})
        found = {test for line in range(mutant.line, mutant.last_line + 1) for test in here.get(line, ())}
        if mutant.at_import or not found:  # any test of the module may notice, or of one that imports its constants
            files = (mutant.file, *self.importers.get(mutant.file, ()))
            found = {test for file in files for tests in self.by_line.get(file, {}).values() for test in tests}
        module = Path(mutant.file)
        folder = "/".join(module.parts[2:-1])

        def distance(test: str) -> int:
            path = test.split("::")[0]
            mirrored = module.stem in Path(path).stem
            return 0 if mirrored and folder in path else 1 if path == mutant.file or mirrored else 2

        order = sorted(found, key=lambda test: (distance(test), self.seconds[test]))
        return order + [test for test in self.starting_processes if test not in found]


def map_tests(root: Path, jobs: int, cache: Path, below: Sequence[str]) -> TestMap:
    """Which tests run which lines: run once, and again only where a file of tests, or one that it runs, changed."""
    digests = {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (*root.glob("src/**/*.py"), *root.glob("tests/**/test_*.py"))
    }
    known: dict[str, Any] = json.loads(cache.read_text("utf-8")) if cache.exists() else {}
    known = {
        file: entry
        for file, entry in known.items()
        if all(digests.get(path) == digest for path, digest in entry["digests"].items())
    }
    wanted = [file for file in digests if file.startswith(tuple(below)) and not any(each in file for each in GPU_ONLY)]
    has_tests = [file for file in wanted if file.startswith("tests/") or ">>> " in (root / file).read_text("utf-8")]
    stale = [file for file in has_tests if file not in known]
    if stale:
        print(f"mutate: finding out which lines the tests of {len(stale)} files run", flush=True)
    for some in (stale[i : i + _FILES] for i in range(0, len(stale), _FILES)):
        tests = _lines_of_tests(root, some, jobs)
        for file in some:
            own = {name: each for name, each in tests.items() if name.split("::")[0] == file}
            paths = {file, *(path for each in own.values() for path in each["lines"])} & digests.keys()
            known[file] = {"digests": {path: digests[path] for path in paths}, "tests": own}
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(json.dumps(known), "utf-8")
    tests = {name: each for file in has_tests for name, each in known[file]["tests"].items()}
    by_line: dict[str, dict[int, list[str]]] = {}
    for test, each in tests.items():
        for path, lines in each["lines"].items():
            for line in lines:
                by_line.setdefault(path, {}).setdefault(line, []).append(test)
    seconds = {test: each["seconds"] for test, each in tests.items()}
    processes = [test for test, each in tests.items() if each["subprocess"]]
    return TestMap(seconds, by_line, processes, find_importers(root))


def find_importers(root: Path) -> dict[str, list[str]]:
    """Of each file of src, the files of src that import from it."""
    paths = {".".join(path.relative_to(root / "src").with_suffix("").parts): path for path in root.glob("src/**/*.py")}
    found: dict[str, list[str]] = {}
    for path in paths.values():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = (node.module, *(f"{node.module}.{each.name}" for each in node.names))
                for name in names:
                    if name in paths:
                        imported = str(paths[name].relative_to(root))
                        found.setdefault(imported, []).append(str(path.relative_to(root)))
    return found


def _lines_of_tests(root: Path, files: Sequence[str], jobs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "coverage_by_test", "-n", str(jobs), *files]
        own = environment(root, MOESAIC_LINES_TO=folder)
        result = subprocess.run(command, cwd=root, env=own, capture_output=True, text=True)
        parts = [json.loads(path.read_text("utf-8")) for path in Path(folder).glob("*.json")]
    failed = [test for part in parts for test in part["failed"]]
    if failed:
        print(f"mutate: these fail without any change and are left out: {failed}", flush=True)
    if not any(part["tests"] for part in parts) and result.returncode not in (0, 5):
        sys.exit(f"mutate: no test ran\n{result.stdout[-3000:]}")
    return {name: each for part in parts for name, each in part["tests"].items()}


def environment(root: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join([str(root / "src"), str(TOOLS), *filter(None, [os.environ.get("PYTHONPATH")])])
    threads = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, "PYTHONPATH": path, **threads, **more}


# ---- running mutants


class MutantRunner:
    """Runs one mutant at a time in a copy of the tree."""

    def __init__(self, folder: Path, tests: TestMap | None, limit: float) -> None:
        self.root, self.tests, self.limit = folder, tests, limit
        files = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in files.stdout.splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        # by content, not by time: a change may leave a file as long as it was, within the same second
        command = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "src"]
        subprocess.run([sys.executable, *command], cwd=folder, check=True)

    def run_mutant(self, mutant: Mutant) -> MutantResult:
        assert self.tests is not None
        path = self.root / mutant.file
        before = path.read_text("utf-8")
        start = time.monotonic()
        status, by = "no coverage", ""
        try:
            path.write_text(mutant.source, "utf-8")
            names = self.tests.tests_for(mutant)
            for some in self._batches(names):
                status, by = self.run(some)
                if status != "survived":
                    break
        finally:
            path.write_text(before, "utf-8")
        return MutantResult(mutant.place, mutant.diff(before), status, by, round(time.monotonic() - start, 1))  # type: ignore[arg-type]

    def _batches(self, names: list[str]) -> Iterator[list[str]]:
        """The first ones alone: to collect all tests takes longer than to run those that mostly suffice."""
        assert self.tests is not None
        first, seconds = 0, 0.0
        while first < len(names) and (first < 3 or seconds < 8) and first < 60:
            seconds += self.tests.seconds[names[first]]
            first += 1
        yield from filter(None, (names[:first], names[first:]))

    def run(self, names: list[str]) -> tuple[str, str]:
        """Status of the mutant in place, and the test that killed it."""
        assert self.tests is not None
        chosen, log = self.root / "mutate-tests.json", self.root / "mutate-log.txt"
        chosen.write_text(json.dumps(names), "utf-8")
        files = list(dict.fromkeys(name.split("::")[0] for name in names))
        patience = self.limit + 5 * sum(self.tests.seconds[name] for name in names)
        arguments = [
            "-q",
            "-x",
            "-p",
            "coverage_by_test",
            "--tb=no",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            *files,
        ]
        own = environment(self.root, MOESAIC_TESTS_FROM=str(chosen))
        request = {
            "folder": str(self.root), "environment": own, "arguments": arguments, "log": str(log), "seconds": patience,
        }  # fmt: skip
        code = self._ask_server(request)
        if code == "timeout":
            return "timeout", f"after {patience:.0f} s"
        if code == "0":
            return "survived", ""
        if code == "5":
            return "no coverage", "no test was collected"
        shown = log.read_text("utf-8", errors="replace")
        failed = [line for line in shown.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return "killed", failed[0] if failed else shown[-300:]

    def _ask_server(self, request: dict[str, Any]) -> str:
        server = self._server
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        reply = server.stdout.readline().strip()
        if not reply:
            sys.exit("mutate: tools/pytest_server.py ended")
        return reply

    @cached_property
    def _server(self) -> subprocess.Popen[str]:
        """Ends with this process, as its standard input does."""
        command = [sys.executable, str(TOOLS / "pytest_server.py")]
        own = environment(self.root)
        return subprocess.Popen(command, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="places to change (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="draws the places (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants run at a time (default: %(default)s)")
    parser.add_argument("--paths", nargs="*", default=["src/moesaic"], help="files and folders to change")
    parser.add_argument("--tests", nargs="*", default=["tests", "src"], help="files and folders of tests to run")
    parser.add_argument("--timeout", type=float, default=60, help="seconds beyond five times what the tests take")
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--dry-run", action="store_true", help="show the mutants and run none")
    args = parser.parse_args()
    found = [ROOT / path for path in args.paths]
    files = [str(file.relative_to(ROOT)) for path in found for file in (sorted(path.rglob("*.py")) or [path])]
    files = [file for file in files if not any(part in file for part in GPU_ONLY)]
    mutants = draw_mutants(files, args.count, args.seed)
    if args.dry_run:
        for mutant in mutants:
            print(f"{mutant.place}\n{mutant.diff((ROOT / mutant.file).read_text('utf-8'))}")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        results = run_mutants(mutants, args, Path(folder))
    lost = [each for each in results if each.survived]
    share = 100 * (len(results) - len(lost)) / max(len(results), 1)
    print("\nsurvivors:" if lost else "\nno survivors")
    for each in lost:
        print(f"{each.place} ({each.status})\n{each.diff}")
    print(
        f"\nseed {args.seed}: {len(results)} mutants, {len(results) - len(lost)} noticed, {len(lost)} survived: "
        f"{share:.1f} % noticed"
    )
    if args.json:
        report = {"seed": args.seed, "share": share, "results": [asdict(each) for each in results]}
        args.json.write_text(json.dumps(report, indent=1), "utf-8")
    return 0


def run_mutants(mutants: Sequence[Mutant], args: argparse.Namespace, folder: Path) -> list[MutantResult]:
    first = MutantRunner(folder / "0", None, args.timeout)
    tests = map_tests(first.root, args.jobs, ROOT / ".cache" / "mutate.json", args.tests)
    free: SimpleQueue[MutantRunner] = SimpleQueue()
    runners = [MutantRunner(folder / str(i), tests, args.timeout) for i in range(args.jobs)]
    for runner in runners:
        free.put(runner)

    control = sorted(tests.seconds, key=lambda test: tests.seconds[test])[:: max(1, len(tests.seconds) // 20)][:20]
    for runner in runners:  # a run that fails for another reason would count as noticed
        status, by = runner.run(control)
        if status != "survived":
            sys.exit(f"mutate: the tests fail without any change: {by}")

    def run_mutant(mutant: Mutant) -> MutantResult:
        runner = free.get()
        try:
            result = runner.run_mutant(mutant)
        finally:
            free.put(runner)
        print(f"{result.status:9} {result.seconds:5.0f} s  {result.place}  {result.by[:120]}", flush=True)
        return result

    with ThreadPoolExecutor(args.jobs) as pool:
        return list(pool.map(run_mutant, mutants))


if __name__ == "__main__":
    sys.exit(main())
