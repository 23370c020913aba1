"""Fails when the tree breaks a rule of its layout: file sizes, arrows between layers, names of modules and tests.

Usage: check_layout.py [ROOT]      Rules:
  sizes   no source file has more than MAX_LINES lines; the median is at most MEDIAN_LINES
  columns no line of C++ has more than MAX_COLUMNS; comments count too, because the formatter does not break them
  arrows  an #include never points to a higher layer; torch's and autograd's headers stay in their folders, and CUDA's are nowhere
  bodies  a declaration of a header is not defined in a higher layer. A header that every layer may include counts as part of the lowest layer
          that includes it
  circles Python modules below python/ do not import each other in a circle. Imports inside functions and under TYPE_CHECKING count too: each
          import means that one module cannot be understood without the other. A module's packages do not count, though it runs their
          __init__.py
  packages a module of python/tandem imports its own package, packages before it in PACKAGES, and modules beside tandem/__init__.py
  tops    no module beside the __init__.py of a Python package below python/ has a name that begins with one underscore: it lies in a package
          below that one whose name says what it is about. The stub of the extension is an exception.
  tests   if a header names tests as "(test X)" or "(tests X, Y)", they are suites or cases of tests/; "*" stands for any text
"""

import ast
import fnmatch
import re
import statistics
import sys
from pathlib import Path

import declarations

MAX_LINES = 700
MEDIAN_LINES = 200
MAX_COLUMNS = 100
SOURCE_SUFFIXES = {".cpp", ".h", ".py"}
SKIPPED_FOLDERS = {"build", "dist", "out", "node_modules", "__pycache__"}

# The layers, lowest first. A folder may include folders of its own row and of the rows before it. A folder inside another one is a layer of
# its own if it is listed.
LAYERS = [
    ["kernels"],
    ["kernel_ops/framework", "quantization/formats"],
    ["kernel_ops"],
    ["core"],
    ["quantization"],
    ["ops", "fusions"],
    ["planner"],
    ["executor"],
    ["autograd"],
    ["pipeline"],
    ["front", "tandem", "bindings"],  # `tandem` is include/tandem
    ["cli"],
]
# The packages of python/tandem, lowest first.
PACKAGES = ["quantized", "recipe", "regions", "op_base", "user_ops", "pipelines", "ops", "modules", "state", "backend", "compilers", "report"]
RANK = {folder: rank for rank, row in enumerate(LAYERS) for folder in row}
SEEN_BY_ALL = {"tandem/export.h", "tandem/memory.h", "tandem/version.h", "tandem/recipe.h", "tandem/report.h", "tandem/activations.h", "tandem/options.h", "tandem/op_options.h"}  # values and build settings only
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
TORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")
CUDA = re.compile(r"^(cuda|cub/|cublas|cudnn|cutlass/|cute/|thrust/|cooperative_groups|nccl|nvtx)")
AUTOGRAD = re.compile(r"^torch/csrc/autograd/")
COMMENT_BREAK = re.compile(r"\n\s*//[/!]?")
NAMED_TESTS = re.compile(r"\(tests?\s+([A-Z*][\w.*]*(?:,\s+[A-Z*][\w.*]*)*)\)")
TEST_CASE = re.compile(r"\b(?:TYPED_)?TEST(?:_[FP])?\(\s*(\w+)\s*,\s*(\w+)")


def source_files(root: Path) -> list[Path]:
    """Every source file below `root`, except in hidden folders and in folders that builds write."""

    def walk(folder: Path):
        for entry in sorted(folder.iterdir()):
            if entry.name.startswith(".") or entry.is_symlink():
                continue
            if entry.is_dir():
                if entry.name not in SKIPPED_FOLDERS:
                    yield from walk(entry)
            elif entry.suffix in SOURCE_SUFFIXES:
                yield entry

    return list(walk(root))


def line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def check_sizes(root: Path, files: list[Path]) -> list[str]:
    counts = {path: line_count(path) for path in files}
    problems = [
        f"{path.relative_to(root)}: expected at most {MAX_LINES} lines, got {lines}. Split it."
        for path, lines in counts.items()
        if lines > MAX_LINES
    ]
    median = statistics.median(counts.values()) if counts else 0
    if median > MEDIAN_LINES:
        problems.append(f"expected a median of at most {MEDIAN_LINES} lines per file, got {median}. Split the longest.")
    return problems


def layer_of(path: Path) -> str | None:
    """The key in RANK of the layer to which a path, relative to the root, belongs."""
    parts = path.parts
    if parts[0] in ("src", "include") and len(parts) > 2:
        return folder_of("/".join(parts[1:]))
    return "cli" if parts[0] == "cli" else None


def folder_of(header: str) -> str:
    """The folder of LAYERS that a path below src/ lies in."""
    inner = "/".join(header.split("/")[:2])
    return inner if inner in RANK else header.split("/")[0]


def check_include(path: Path, layer: str, included: str) -> str | None:
    """Why `path`, of `layer`, must not include `included`; None if it may."""
    if layer == "kernels" and TORCH.match(included):
        return "kernels know no torch: pass raw views"
    if CUDA.match(included):
        return "the library builds without CUDA's headers"
    if AUTOGRAD.match(included) and path.parts[0] == "src" and layer != "autograd":
        if not (layer == "bindings" and included.endswith("/python_variable.h")):
            return "only src/autograd includes torch/csrc/autograd"
    target = folder_of(included)
    if included in SEEN_BY_ALL or "/" not in included or target not in RANK:
        return None
    if RANK[target] > RANK[layer]:
        return f"{target} lies above {layer}: move what is needed down, or the caller up"
    return None


def check_columns(root: Path, files: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(root)}:{number}: expected at most {MAX_COLUMNS} columns, got {len(line)}. Break the line."
        for path in files
        if path.suffix != ".py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if len(line) > MAX_COLUMNS
    ]


def check_arrows(root: Path, files: list[Path]) -> list[str]:
    problems = []
    for path in files:
        relative = path.relative_to(root)
        layer = layer_of(relative)
        if path.suffix == ".py" or relative.parts[0] == "cmake":
            continue
        if layer is not None and layer not in RANK:
            problems.append(f"{relative}: expected a folder of LAYERS in check_layout.py, got {layer}. Add it there.")
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            found = INCLUDE.match(line)
            wrong = check_include(relative, layer, found[1]) if found and layer else None
            if wrong:
                problems.append(f"{relative}:{number}: expected no arrow upwards, got {found[1]}; {wrong}.")
    return problems


def check_bodies(root: Path, files: list[Path]) -> list[str]:
    ranks: dict[Path, int] = {}
    for path in files:
        layer = layer_of(path.relative_to(root))
        if path.suffix != ".py" and layer in RANK:
            ranks[path] = RANK[layer]
    for path, rank in list(ranks.items()):
        for found in map(INCLUDE.match, path.read_text(encoding="utf-8").splitlines()):
            header = root / "include" / found[1] if found and found[1] in SEEN_BY_ALL else None
            if header in ranks:
                ranks[header] = min(ranks[header], rank)
    read = {path: declarations.read(path) for path in ranks}
    bodies: dict[declarations.Name, list[Path]] = {}
    for path, content in read.items():
        for name in content.defined:
            bodies.setdefault(name, []).append(path)
    problems = []
    for path, content in read.items():
        for name in sorted(content.declared, key=str) if path.suffix == ".h" else ():
            found_in = bodies.get(name, [])
            if found_in and all(ranks[body] > ranks[path] for body in found_in):
                problems.append(
                    f"{path.relative_to(root)}: expected {name} to be defined in its own layer or below, got {found_in[0].relative_to(root)}. "
                    "Declare it there."
                )
    return problems


def imports_of(path: Path, name: str, modules: dict[str, Path]) -> set[str]:
    """The modules among `modules` that the module `name` imports, anywhere in its code."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                submodule = f"{origin}.{alias.name}"
                found.add(submodule if submodule in modules else origin)
    return found & modules.keys()


def circle_through(start: str, arrows: dict[str, set[str]]) -> list[str]:
    """The shortest circle of `arrows` through `start`; empty if there is none."""
    before: dict[str, str] = {}
    reached = [start]
    for module in reached:
        for target in sorted(arrows.get(module, ())):
            if target == start:
                way = [module]
                while way[-1] != start:
                    way.append(before[way[-1]])
                return [*reversed(way), start]
            if target not in before:
                before[target] = module
                reached.append(target)
    return []


def python_arrows(root: Path) -> tuple[dict[str, Path], dict[str, set[str]]]:
    """The modules below python/ by name, and for each the modules that it imports."""
    folder = root / "python"
    modules = {}
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.pyi")]):  # a stub without a source is an extension, which imports nothing
        parts = path.relative_to(folder).with_suffix("").parts
        modules.setdefault(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path)
    return modules, {name: imports_of(path, name, modules) for name, path in modules.items() if path.suffix == ".py"}


def check_packages(root: Path) -> list[str]:
    modules, arrows = python_arrows(root)
    packages = {name: name.split(".")[1] for name in modules if name.count(".") > 1 or (name.count(".") and modules[name].name == "__init__.py")}
    problems = [
        f"{modules[name].relative_to(root)}: expected a package of PACKAGES in check_layout.py, got {package}. Add it there."
        for name, package in packages.items()
        if package not in PACKAGES
    ]
    ranks = {name: PACKAGES.index(package) for name, package in packages.items() if package in PACKAGES}
    return problems + [
        f"{modules[name].relative_to(root)}: expected imports of {', '.join(PACKAGES[: rank + 1])} only, got {target}. Move what both need into one of these."
        for name, rank in ranks.items()
        for target in sorted(arrows[name])
        if ranks.get(target, -1) > rank
    ]


def check_circles(root: Path) -> list[str]:
    modules, arrows = python_arrows(root)
    problems, told = [], set()
    for name in sorted(arrows):
        circle = circle_through(name, arrows) if name not in told else []
        if circle:
            told.update(circle)
            problems.append(
                f"{modules[name].relative_to(root)}: expected no circle of imports, got {' -> '.join(circle)}. Move what both need into a "
                "module below them."
            )
    return problems


def check_tops(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}: expected a module in a package that says what it is about, got an underscored one beside __init__.py. Move it there."
        for path in sorted((root / "python").glob("*/_*.py"))
        if not path.name.startswith("__")
    ]


def check_tests(root: Path, files: list[Path]) -> list[str]:
    names = {
        name
        for path in files
        if path.suffix == ".cpp" and root / "tests" in path.parents
        for case in TEST_CASE.finditer(path.read_text(encoding="utf-8"))
        for name in (case[1], case[2], f"{case[1]}.{case[2]}")
    }
    return [
        f"{path.relative_to(root)}: expected a suite or a case of tests/ for what holds, got {name}, which none is called. Name one that is there."
        for path in files
        if path.suffix == ".h" and layer_of(path.relative_to(root))
        for said in NAMED_TESTS.finditer(COMMENT_BREAK.sub("", path.read_text(encoding="utf-8")))
        for name in re.split(r",\s+", said[1])
        if not fnmatch.filter(names, name)
    ]


def main(root: Path) -> int:
    files = source_files(root)
    problems = check_circles(root) + check_packages(root) + check_tops(root)
    for check in (check_sizes, check_columns, check_arrows, check_bodies, check_tests):
        problems += check(root, files)
    for problem in problems:
        print(f"check_layout: {problem}", file=sys.stderr)
    if not problems:
        median = statistics.median(map(line_count, files)) if files else 0
        print(f"check_layout: {len(files)} files, median {median:g} lines: layout holds")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()))
