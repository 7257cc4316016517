"""No module imports itself indirectly, not even inside a function."""

from graphlib import TopologicalSorter

import grimp

PACKAGES = ("sparse_kernels", "vllm_sparse_plugin", "bench")


def test_there_is_no_circle_of_imports():
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 100
    TopologicalSorter(imports).prepare()  # names a circle where there is one
