"""The house stays easy to see: imports run one way, no circles, files are short, nobody reaches into another's privates."""

from __future__ import annotations

import ast
import pathlib

import pytest

from hf_gnmr.backends import BACKENDS
from hf_gnmr.backends.bnb.stores import STORES
from hf_gnmr.control.triggers import TRIGGERS

REPOSITORY = pathlib.Path(__file__).parents[1]
PACKAGE = REPOSITORY / "hf_gnmr"
ORDER = (
    ("config", "files", "reading", "script", "terminal"),
    ("control",),
    ("trace",),
    ("backends",),
    ("training",),
    ("run",),
    ("evaluation", "cli", "train"),
)
"""Wings and top files, lowest first; each imports from those before it, and from itself."""
LONGEST = 350
FOREIGN = {"_load_from_checkpoint", "_load_best_model", "_load_from_state_dict", "_version"}
"""Private names of torch and transformers, which we override or read."""
FILES = {
    ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): file
    for file in sorted(PACKAGE.rglob("*.py"))
    if not {"recipes", "eval_tasks"} & set(file.relative_to(PACKAGE).parts)
}
"""By module name below the package; "__init__" is the package itself."""
TREES = {module: ast.parse(file.read_text(encoding="utf-8")) for module, file in FILES.items()}


def imports(module: str) -> set[str]:
    """Modules of ours that a module imports, at its top or inside a function; not those for type checking only."""
    package = module.split(".") if FILES[module].name == "__init__.py" else module.split(".")[:-1]
    package = [] if module == "__init__" else package
    targets: set[str] = set()
    for node in without_type_checking(TREES[module]):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = [*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else [])]
        for alias in node.names:
            full = ".".join([*base, alias.name])
            targets.add(full if full in FILES else ".".join(base) or "__init__")
    return targets - {module}


def without_type_checking(tree: ast.AST):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        yield from without_type_checking(node)


def level(module: str) -> int:
    top = module.split(".")[0]
    return next(i for i, names in enumerate(ORDER) if top in names)


def test_every_module_is_in_a_wing():
    known = {name for names in ORDER for name in names}
    assert {module.split(".")[0] for module in FILES} - {"__init__"} == known


@pytest.mark.parametrize("module", [m for m in FILES if m != "__init__"])
def test_imports_run_one_way(module):
    # The package itself gives its version, and nothing else, to what is in it.
    upward = [target for target in imports(module) - {"__init__"} if level(target) > level(module)]
    assert not upward, f"{module} imports {', '.join(upward)}, which is above it"


def test_the_package_gives_only_its_version_to_its_modules():
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level and not node.module and module != "__init__":
                names = {alias.name for alias in node.names}
                depth = len(module.split(".")) - (FILES[module].name != "__init__.py")
                if node.level > depth:
                    assert names <= {"__version__"}, (module, names)


def test_there_is_no_import_circle():
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join((*path[path.index(module) :], module))
        if module in done:
            return
        for target in imports(module) - {"__init__"}:
            visit(target, (*path, module))
        done.add(module)

    for module in FILES:
        if module != "__init__":
            visit(module, ())


@pytest.mark.parametrize("wing", ["control", "trace", "config", "files", "reading", "terminal"])
def test_no_torch_where_traces_are_read(wing):
    for module, tree in TREES.items():
        if module.split(".")[0] != wing:
            continue
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            heavy = [name for name in names if name.split(".")[0] in ("torch", "transformers", "peft", "bitsandbytes")]
            assert not heavy, f"{module} imports {', '.join(heavy)}"


@pytest.mark.parametrize("module", list(FILES))
def test_files_are_short(module):
    lines = len(FILES[module].read_text(encoding="utf-8").splitlines())
    assert lines <= LONGEST, f"{module} has {lines} lines: split it by idea"


def private_names(tree: ast.AST) -> set[str]:
    """Names with one leading underscore that a file defines, or sets on its own objects."""
    names = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))}
    names |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names |= {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute)
        and isinstance(n.ctx, ast.Store)
        and isinstance(n.value, ast.Name)
        and n.value.id in ("self", "cls")
    }
    return {name for name in names if name.startswith("_") and not name.startswith("__")} - FOREIGN


def test_nobody_reaches_into_anothers_privates():
    private = {module: private_names(tree) for module, tree in TREES.items()}
    for module, tree in TREES.items():
        elsewhere = set().union(*(names for other, names in private.items() if other != module)) - private[module]
        for node in ast.walk(tree):
            own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if isinstance(node, ast.Attribute) and node.attr in elsewhere and not own:
                raise AssertionError(f"{FILES[module]}:{node.lineno} reads .{node.attr}, which is another file's")
            if isinstance(node, ast.ImportFrom) and node.level:
                names = [alias.name for alias in node.names if alias.name.startswith("_") and alias.name != "__version__"]
                assert not names, f"{FILES[module]}:{node.lineno} imports {', '.join(names)}"


@pytest.mark.parametrize("folder", ["eval", "examples"])
def test_benches_and_examples_use_public_names_only(folder):
    private = set().union(*map(private_names, TREES.values()))
    for file in sorted((REPOSITORY / folder).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        own = private_names(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in private - own:
                raise AssertionError(f"{file}:{node.lineno} reads .{node.attr}, which is the package's own")


@pytest.mark.parametrize("module", list(FILES))
def test_the_package_imports_itself_relatively(module):
    for node in ast.walk(TREES[module]):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        absolute = [name for name in names if name.split(".")[0] == PACKAGE.name]
        assert not absolute, f"{FILES[module]}:{node.lineno} imports {', '.join(absolute)}: such imports escape these tests"


BY_NAME = ("__init__", "cli", "evaluation.tokens")
"""Modules that import by a name in a string: the package's lazy names, the commands, the tasks in eval/."""


@pytest.mark.parametrize("module", [m for m in FILES if m not in BY_NAME])
def test_imports_by_a_string_are_few(module):
    called = [n.func for n in ast.walk(TREES[module]) if isinstance(n, ast.Call)]
    names = {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in called}
    assert not names & {"import_module", "__import__", "spec_from_file_location"}, FILES[module]


NAMES = {*BACKENDS, *STORES, *TRIGGERS}
CORE = ("training", "run", "trace", "train", "cli")


@pytest.mark.parametrize("module", [m for m in FILES if m.split(".")[0] in CORE])
def test_core_files_do_not_branch_on_the_names_of_backends_stores_and_triggers(module):
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Compare):
            texts = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
            assert not texts & NAMES, f"{FILES[module]}:{node.lineno} compares with {', '.join(sorted(texts & NAMES))}"
