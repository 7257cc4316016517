"""The first requests of a server compile no kernel of this plugin."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_sparse_plugin.config import preset_names
from vllm_sparse_plugin.names import BACKENDS, backend_beside

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

# Kernels stay compiled in a process, so each backend has its own.
PROGRAM = """
import random, sys
import sparse_kernels.cuda.launch
from support.gpu_engines import engine
from triton import knobs
from vllm import SamplingParams

rng, compiled = random.Random(0), []

def note(**event):
    if event["fn"].module.startswith(("sparse_kernels", "vllm_sparse_plugin")):
        compiled.append(event["fn"].name)

def compile_source(source, *arguments):
    compiled.append(source.name)
    return from_source(source, *arguments)

preset, settings = sys.argv[2], {}
if preset != "-":
    settings = {"preset": preset} | ({"offload": {"host_memory": "2GiB"}} if preset == "unique_offload" else {})
cache = {"kv_cache_memory_bytes": None} if preset == "unique_offload" else {}
with engine(attention_backend=sys.argv[1], additional_config={"sparse_attention": settings}, **cache) as llm:
    knobs.runtime.jit_post_compile_hook = note
    from_source = sparse_kernels.cuda.launch.compile_source
    sparse_kernels.cuda.launch.compile_source = compile_source
    for lengths in ([4000, 1300], [12000], [1, 17, 300, 2049], [4000] * 6):
        prompts = [{"prompt_token_ids": rng.choices(range(3, 4000), k=length)} for length in lengths]
        for _ in range(2):
            llm.generate(prompts, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True), use_tqdm=False)
    llm.generate(prompts, SamplingParams(max_tokens=20, temperature=1, logprobs=3, ignore_eos=True), use_tqdm=False)
print("compiled:", *compiled)
"""
NAMES = [(name.lower(), "-") for name in BACKENDS if name not in ("SINKROUTER", "DENSE")]
NAMES += [(backend_beside(name), name) for name in preset_names() if name.upper() not in BACKENDS]
"""`sinkrouter` needs a calibration, and `dense` has no kernels of the plugin while prompts are computed."""


@pytest.mark.parametrize(("backend", "preset"), NAMES)
def test_first_requests_compile_nothing(backend: str, preset: str) -> None:
    command = [sys.executable, "-c", PROGRAM, backend, preset]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "compiled:\n" in done.stdout, done.stdout[-2000:]
