"""Members that this plugin's attention classes inherit from vLLM, read from vLLM's sources, independent of a GPU.

`python tests/support/inherited.py PATH_OF_VLLM` prints the names for `tests/unit/vllm_inherited/VERSION.json`.
"""

import ast
import json
import sys
from pathlib import Path

FILES = ("v1/attention/backend.py", "v1/attention/backends/flash_attn.py", "v1/attention/backends/cpu_attn.py")
BASES = (
    "FlashAttentionBackend",
    "FlashAttentionImpl",
    "FlashAttentionMetadataBuilder",
    "FlashAttentionMetadata",
    "CPUAttentionBackend",
    "CPUAttentionBackendImpl",
    "CPUAttentionMetadataBuilder",
    "CPUAttentionMetadata",
)
"""The classes of vLLM that this plugin derives from."""


def inherited_names(vllm: Path) -> dict[str, list[str]]:
    """Attributes and methods of `BASES`, including those of their bases in the same files.

    Args:
        vllm: folder of vLLM's package.
    """
    classes: dict[str, ast.ClassDef] = {}
    for file in FILES:
        for node in ast.parse((vllm / file).read_text()).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] = node
    return {base: sorted(_names(base, classes)) for base in BASES}


def _names(name: str, classes: dict[str, ast.ClassDef]) -> set[str]:
    node = classes[name]
    found = {target for statement in ast.walk(node) for target in _assigned_to_self(statement)}
    for statement in node.body:
        match statement:
            case ast.FunctionDef(name=method):
                found.add(method)
            case ast.AnnAssign(target=ast.Name(id=attribute)):
                found.add(attribute)
            case ast.Assign(targets=targets):
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    for base in node.bases:
        expression = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(expression, ast.Name) and expression.id in classes:
            found |= _names(expression.id, classes)
    return found


def _assigned_to_self(statement: ast.AST) -> set[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return {
        target.attr
        for target in targets
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }


if __name__ == "__main__":
    print(json.dumps(inherited_names(Path(sys.argv[1])), indent=1))
