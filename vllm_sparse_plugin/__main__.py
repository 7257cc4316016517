"""`python -m vllm_sparse_plugin`: the `vllm-sparse` command."""

from vllm_sparse_plugin.tools.cli import main

if __name__ == "__main__":
    main()
