"""Who may import whom. The reference is a tower: each layer rests on those below it, and on NumPy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import refimpl

FOLDER = Path(refimpl.__file__).parent

LAYERS = [
    {"errors"},
    {"layout", "collectives", "lengths", "threads"},
    {"partition", "mask"},
    {"environment", "metadata"},
    {"attention", "cost"},
    {"tiled", "tolerance", "lse"},
    {"context_parallel"},
    {"faults"},
    {"verify"},
    {"report"},
    {"conformance"},
    {"cli"},
    {"__init__"},
]
"""A module imports only from layers above its own line; a new module must be given its place here.

A subpackage is one module in this respect: what its parts import of each other is its own affair.
"""

LEVEL = {module: level for level, layer in enumerate(LAYERS) for module in layer}


def imports(source):
    """Every imported module, dotted, wherever in the file; `from refimpl import x` gives refimpl.x."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import: write the full name"
            if node.module == "refimpl":
                yield from (f"refimpl.{alias.name}" for alias in node.names)
            else:
                yield node.module


def violations(sources):
    """What is wrong with {file: source}, as a list of sentences; files are "mask", "conformance/cases"."""
    modules = {file.split("/")[0] for file in sources}
    wrong = [f"{module} has no layer" for module in sorted(modules - set(LEVEL))]
    for file, source in sources.items():
        module = file.split("/")[0]
        for name in imports(source):
            top, _, rest = name.partition(".")
            if top == "cupy_backend":
                wrong.append(f"{file} imports {name}")
            elif top == "refimpl":
                target = rest.split(".")[0] or "__init__"
                if target not in modules:
                    wrong.append(f"{file} imports {name}, which is no module")
                elif target == module and "/" in file:
                    continue
                elif LEVEL.get(target, -1) >= LEVEL.get(module, len(LAYERS)):
                    wrong.append(f"{file} imports {target}, which is not below it")
    return wrong


@pytest.mark.clause("C5")
def test_imports_point_downwards():
    files = {path.relative_to(FOLDER).with_suffix("").as_posix(): path.read_text() for path in FOLDER.rglob("*.py")}
    assert violations(files) == []
    assert {file.split("/")[0] for file in files} == set(LEVEL), "a layer names a module that is gone"


@pytest.mark.clause("C5")
@pytest.mark.parametrize(
    ("module", "line", "complaint"),
    [
        ("layout", "from refimpl.partition import Policy", "layout imports partition, which is not below it"),
        ("layout", "from refimpl.lse import lse_to", "layout imports lse, which is not below it"),
        ("layout", "def f():\n    import refimpl.attention as a", "layout imports attention, which is not below it"),
        ("collectives", "from refimpl.layout import PackedLayout", "collectives imports layout, which is not below it"),
        ("attention", "from refimpl import tiled", "attention imports tiled, which is not below it"),
        ("mask", "import refimpl", "mask imports __init__, which is not below it"),
        ("verify", "from cupy_backend.attention import f", "verify imports cupy_backend.attention"),
        ("verify", "if True:\n    import cupy_backend", "verify imports cupy_backend"),
        ("newcomer", "", "newcomer has no layer"),
        ("conformance/cases", "from refimpl.cli import main", "conformance/cases imports cli, which is not below it"),
        ("mask", "from refimpl.mask import AttentionMask", "mask imports mask, which is not below it"),
        ("mask", "from refimpl import nothing", "mask imports refimpl.nothing, which is no module"),
    ],
)
def test_the_check_finds_a_wrong_import(module, line, complaint):
    assert violations(dict.fromkeys(LEVEL, "") | {module: line}) == [complaint]


@pytest.mark.clause("C5")
def test_a_subpackage_may_import_its_own_parts():
    assert violations(dict.fromkeys(LEVEL, "") | {"conformance/judge": "import refimpl.conformance.cases"}) == []


@pytest.mark.clause("C5")
def test_importing_refimpl_loads_nothing_optional():
    """No command line, no MPI, no other framework: `import refimpl` works where only NumPy and SciPy are."""
    unwanted = ["click", "rich", "mpi4py", "torch", "ml_dtypes", "cupy", "threadpoolctl", "matplotlib", "cupy_backend"]
    code = f"import sys, refimpl; print(*(name for name in {unwanted!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=FOLDER.parent)
    assert done.stdout.split() == []


@pytest.mark.clause("C5")
def test_every_public_name_is_there_and_listed_once():
    assert sorted(set(refimpl.__all__)) == refimpl.__all__
    for name in refimpl.__all__:
        assert hasattr(refimpl, name)
