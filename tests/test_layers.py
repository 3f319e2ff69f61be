"""Who may import whom: the rooms of the house, read from the source of every module."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent

# What each room may import besides the standard library.
ROOMS = {
    "io": {"bmoe.io", "liburing"},
    "pipeline": {"bmoe.io", "bmoe.pipeline", "numpy"},
}
SETS_UP_LOGGING = {"logging", "structlog"}


def modules_of(room: str) -> list[Path]:
    """Every module of a room, not following the symlinks that make the rooms one package."""
    found: list[Path] = []
    folders = [ROOT / room]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            if path.is_dir() and not path.is_symlink() and path.name != "__pycache__":
                folders.append(path)
            elif path.suffix == ".py":
                found.append(path)
    return found


def imports_of(source: str) -> Iterator[str]:
    """Every module that a source names in an import, at any depth, also for type checking only."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports here are absolute"
            assert node.module is not None
            # `from bmoe import io` names a module, `from bmoe.io import DirectFile` does not.
            yield from (
                (f"bmoe.{alias.name}" for alias in node.names) if node.module == "bmoe" else (node.module,)
            )
        elif isinstance(node, ast.Name) and node.id in {"__import__", "import_module"}:
            yield node.id
        elif isinstance(node, ast.Attribute) and node.attr == "import_module":
            yield node.attr


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def strangers(source: str, room: str) -> list[str]:
    """What a source of that room imports and may not."""
    allowed = ROOMS[room]
    return [
        module
        for module in imports_of(source)
        if module.split(".")[0] in SETS_UP_LOGGING
        or not (
            any(is_within(module, package) for package in allowed)
            or module.split(".")[0] in sys.stdlib_module_names
        )
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_is_below_it(room: str) -> None:
    modules = modules_of(room)
    assert len(modules) >= 4
    found = {str(path.relative_to(ROOT)): strangers(path.read_text(), room) for path in modules}
    assert {path: names for path, names in found.items() if names} == {}


def test_strangers_are_seen_wherever_they_hide() -> None:
    source = """
import os, numpy.linalg
from bmoe.io.files import DirectFile
from bmoe import pipeline
if TYPE_CHECKING:
    from bmoe.session import Session
def late():
    import logging
    importlib.import_module("bmoe.cli")
    from bmoe.iota import x
"""
    assert set(strangers(source, "io")) == {
        "numpy.linalg",
        "bmoe.pipeline",
        "bmoe.session",
        "logging",
        "import_module",
        "bmoe.iota",
    }
    assert strangers("import numpy\nfrom bmoe.pipeline.native import lib", "pipeline") == []


def test_nothing_but_the_command_line_imports_the_command_line() -> None:
    for path in modules_of("bmoe"):
        if "cli" not in path.relative_to(ROOT).parts and path.name != "__main__.py":
            named = [module for module in imports_of(path.read_text()) if is_within(module, "bmoe.cli")]
            assert named == [], path


def test_no_module_of_the_product_imports_the_tests() -> None:
    for room in ("io", "pipeline", "bmoe", "tools"):
        for path in modules_of(room):
            assert not [m for m in imports_of(path.read_text()) if is_within(m, "tests")], path


def test_every_module_says_what_it_is_for() -> None:
    for room in ("io", "pipeline", "bmoe", "tools"):
        for path in modules_of(room):
            assert ast.get_docstring(ast.parse(path.read_text())), path


def public_names(source: str) -> set[str]:
    """What a package offers: its own definitions, and what it imports from its own modules."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and is_within(node.module or "", "bmoe"):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def sort_key(name: str) -> tuple[int, str]:
    """CONSTANTS, then Classes, then functions, as ruff's RUF022 has it."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


PACKAGES = [
    path for room in ("io", "pipeline", "bmoe") for path in modules_of(room) if path.name == "__init__.py"
]


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_a_package_lists_what_it_offers_sorted(path: Path) -> None:
    offered = public_names(path.read_text())
    relative = path.parent.relative_to(ROOT).parts
    name = ".".join(relative if relative[0] == "bmoe" else ("bmoe", *relative))
    module = importlib.import_module(name)
    if not offered and not hasattr(module, "__all__"):
        return
    assert module.__all__ == sorted(set(module.__all__), key=sort_key)
    assert set(module.__all__) == offered
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_the_rooms_are_one_package_by_relative_links() -> None:
    for room in ("io", "pipeline"):
        link = ROOT / "bmoe" / room
        if not link.is_symlink():
            pytest.skip("an installed copy has real folders")
        assert link.readlink() == Path("..") / room


def test_importing_the_lowest_room_loads_no_numpy_and_no_llama() -> None:
    heavy = ("numpy", "llama_cpp", "rich", "structlog")
    program = f"import sys, bmoe.io; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == "[]\n"
