"""What the plugin uses of vLLM is written down, file by file: documents point to `vllm_touches.yaml`."""

import ast
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
TOUCHES = yaml.safe_load(Path(__file__).with_name("vllm_touches.yaml").read_text())
FOREIGN = ("vllm", "prometheus_client.mmap_dict")
NAMED_TUPLE = ("_asdict", "_replace", "_fields")


def imported(tree: ast.AST) -> set[str]:
    """Modules and names of others whose inside we depend on."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if any(f"{name}.".startswith(f"{foreign}.") for foreign in FOREIGN)}


def defined(tree: ast.AST) -> set[str]:
    """Names that a file gives to functions, attributes and variables."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name):
                names.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    return names


def private(tree: ast.AST, ours: set[str]) -> set[str]:
    """Private attributes that the plugin does not define."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in ours
        and node.attr not in NAMED_TUPLE
    }


def test_the_list_says_what_is_used_of_vllm_and_no_more():
    trees = {file: ast.parse(file.read_text()) for file in (ROOT / "vllm_sparse_plugin").rglob("*.py")}
    ours = set().union(*map(defined, trees.values()))
    used = {}
    for file, tree in trees.items():
        names = (imported(tree) - set(TOUCHES["offered"])) | private(tree, ours)
        if names:
            used[file.relative_to(ROOT / "vllm_sparse_plugin").as_posix()] = names
    assert used == {file: set(names) for file, names in TOUCHES["internals"].items()}
    assert set(TOUCHES["offered"]) <= set().union(*map(imported, trees.values()))


def test_every_touch_has_a_reason():
    for names in TOUCHES["internals"].values():
        assert all(isinstance(reason, str) and reason.endswith(".") for reason in names.values())
