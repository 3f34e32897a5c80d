"""The rooms of the package and who may import whom, read from the source."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import hf_dsde

PACKAGE = Path(hf_dsde.__file__).parent

FLOORS = (
    {"utils", "compat", "signals"},
    {"kernels", "costs", "lossy_acceptance"},
    {"policies"},
    {"heads"},
    {"execution"},
    {"config"},
    {"measurement"},
    {"divergence"},
    {"decoding"},
    {"drafting"},
    {"integration"},
    {"smollm2"},
    {"pairs"},
    {"hub"},
    {"plots", "profiling"},
    {"batch"},
    {"trace"},
    {"replay"},
    {"bench", "evaluate_modules"},
    {"cli"},
)
"""A room imports from rooms that stand before it in this list, and from none on its own floor."""

LONGEST_FILE = 400
LONGEST_FUNCTION = 60
"""Lines of a body, without the signature, where commands declare their options, and without the docstring."""
LOOSE_MODULES = 10
LONGEST_LOOP = 250


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in source_files()}


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported(node: ast.AST, at_import_only: bool) -> set[str]:
    """Modules of the package that are imported in a tree, but for those that only type checkers see."""
    found: set[str] = set()
    if isinstance(node, ast.Import):
        found |= {alias.name for alias in node.names if alias.name in MODULES}
    if isinstance(node, ast.ImportFrom) and node.module in MODULES:
        submodules = {f"{node.module}.{alias.name}" for alias in node.names} & set(MODULES)
        names = {alias.name for alias in node.names if f"{node.module}.{alias.name}" not in MODULES}
        found |= submodules | ({node.module} if names else set())
    children = node.orelse if is_for_type_checkers(node) else ast.iter_child_nodes(node)
    for child in children:
        if at_import_only and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        found |= imported(child, at_import_only)
    return found


@cache
def imports_of(module: str, at_import_only: bool = False) -> frozenset[str]:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    return frozenset(imported(tree, at_import_only) - {module})


def room(module: str) -> str:
    return [*module.split("."), "hf_dsde"][1]


def test_every_room_has_a_floor() -> None:
    rooms = {room(module) for module in MODULES if module != "hf_dsde"}
    assert rooms == set().union(*FLOORS)


def test_rooms_import_only_from_the_floors_below() -> None:
    floor = {name: number for number, rooms in enumerate(FLOORS) for name in rooms}
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        if module != "hf_dsde"
        for other in sorted(imports_of(module))
        if room(other) != room(module) and (other == "hf_dsde" or floor[room(other)] >= floor[room(module)])
    ]
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: imports_of(module) for module in MODULES if module != "hf_dsde"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(f"a circle of imports: {' -> '.join(circle.args[1])}")


def test_the_root_holds_few_modules() -> None:
    loose = [file.name for file in PACKAGE.glob("*.py")]
    assert len(loose) <= LOOSE_MODULES, loose


def test_files_and_functions_can_be_read_at_a_sitting() -> None:
    too_long = []
    for file in source_files():
        text = file.read_text(encoding="utf-8")
        if text.count("\n") > LONGEST_FILE:
            too_long.append(f"{file.name}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                described = ast.get_docstring(node) is not None and len(node.body) > 1
                lines = (node.end_lineno or 0) - node.body[described].lineno + 1
                if lines > LONGEST_FUNCTION:
                    too_long.append(f"{file.name}::{node.name}: {lines} lines")
    assert too_long == []


def test_a_round_fits_on_a_few_pages() -> None:
    """What is done in a round, and all that it calls on the loop, stands in one file."""
    text = MODULES["hf_dsde.decoding.loop"].read_text(encoding="utf-8")
    assert text.count("\n") <= LONGEST_LOOP
