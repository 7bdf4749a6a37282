"""What may import what: the contracts in pyproject.toml, and what a fresh interpreter really loads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

IMPORT_EVERYTHING_IN = """
import importlib, pkgutil, sys

def import_all(name):
    module = importlib.import_module(name)
    for child in pkgutil.iter_modules(getattr(module, "__path__", ())):
        import_all(f"{name}.{child.name}")

before = set(sys.modules)
import_all(sys.argv[1])
print(*sorted(set(sys.modules) - before))
"""

SHOW_HELP = """
import sys
from cluster.command import main

sys.argv = ["weald", "--help"]
try:
    main()
except SystemExit as exit:
    assert not exit.code
print(*sorted(sys.modules))
"""


def in_a_fresh_interpreter(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with this checkout in front of whatever is installed."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


def modules_loaded_by(*arguments: str) -> set[str]:
    """Names of the modules that a script prints as its last line."""
    finished = in_a_fresh_interpreter("-c", *arguments)
    assert finished.returncode == 0, finished.stderr
    return set(finished.stdout.splitlines()[-1].split())


def packages_of(modules: set[str]) -> set[str]:
    """Top-level packages, those of the standard library left out."""
    return {module.partition(".")[0] for module in modules} - sys.stdlib_module_names


def test_every_import_follows_the_contracts_in_pyproject() -> None:
    lint = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    finished = in_a_fresh_interpreter("-c", lint)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_types_load_nothing_but_themselves_and_the_standard_library() -> None:
    loaded = modules_loaded_by(IMPORT_EVERYTHING_IN, "services.types")
    assert packages_of(loaded) == {"services"}
    assert all(f"{module}.".startswith("services.types.") for module in loaded if "services." in module)


def test_the_gateway_loads_neither_torch_nor_transformers() -> None:
    loaded = packages_of(modules_loaded_by(IMPORT_EVERYTHING_IN, "services.gateway"))
    assert not loaded & {"torch", "transformers"}


def test_the_wire_loads_neither_arrays_nor_models() -> None:
    loaded = packages_of(modules_loaded_by(IMPORT_EVERYTHING_IN, "services.wire"))
    assert {"grpc", "weald"} <= loaded
    assert not loaded & {"numpy", "torch", "transformers"}


@pytest.mark.parametrize("package", ["speculation", "engine", "draft", "verify"])
def test_models_and_trees_load_no_cluster_store_exporter_grammar_or_front_end(package: str) -> None:
    loaded = packages_of(modules_loaded_by(IMPORT_EVERYTHING_IN, f"services.{package}"))
    assert not loaded & {
        "fastapi",
        "llguidance",
        "opentelemetry",
        "pydantic",
        "ray",
        "redis",
        "rich",
        "typer",
    }


def test_help_is_shown_without_torch_transformers_or_ray() -> None:
    loaded = packages_of(modules_loaded_by(SHOW_HELP))
    assert not loaded & {"ray", "torch", "transformers"}
