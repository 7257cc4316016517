"""What `vllm-sparse serve` does before vLLM's own command line runs."""

import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.offload import memory
from vllm_sparse_plugin.tools import cpu_memory
from vllm_sparse_plugin.tools.cli import main, vllm_commands
from vllm_sparse_plugin.tools.cpu_memory import SPACE, choose_space

GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a CPU build, whose free memory, container and NUMA nodes a test says in GiB."""
    monkeypatch.delenv(SPACE, raising=False)
    monkeypatch.setattr(cpu_memory, "is_cpu_build", lambda: True)

    def build(available: int, container: tuple[int, int] | None = None, nodes: int = 1) -> None:
        (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {available << 20} kB\n")
        for name, value in zip(("max", "current"), container or (), strict=False):
            (tmp_path / f"memory.{name}").write_text(str(value * GIB))
        for node in range(nodes):
            (tmp_path / f"node/node{node}").mkdir(parents=True)
        monkeypatch.setattr(memory, "_MEMORY", tmp_path / "meminfo")
        monkeypatch.setattr(memory, "_CGROUP", tmp_path)
        monkeypatch.setattr(cpu_memory, "_SYSTEM", tmp_path)

    return build


def model_of(folder: Path, gib: int) -> str:
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(gib * GIB)
    return str(folder)


@pytest.mark.parametrize(
    ("available", "weights", "container", "nodes", "space"),
    [
        (48, 16, None, 1, 8),  # a quarter of what is left beside the weights
        (64, None, None, 1, 8),  # weights that are not here yet count as half of the memory
        (144, 16, None, 2, 16),  # each worker has the memory of one node
        (256, 16, (60, 12), 1, 8),  # a container has less than the machine
        (2, 16, None, 1, 1),
        (1024, 16, None, 1, 32),
    ],
)
def test_a_cache_takes_a_part_of_what_is_free(
    machine, monkeypatch, tmp_path, available, weights, container, nodes, space
):
    machine(available, container, nodes)
    model = "org/unknown" if weights is None else model_of(tmp_path, weights)
    assert choose_space([model, "--port", "80"]) == (
        f"{SPACE}={space}: the KV cache takes {space} GiB of memory. Set the variable to choose another size."
    )
    assert cpu_memory.os.environ[SPACE] == str(space)
    monkeypatch.delenv(SPACE)
    assert f"{SPACE}={space}:" in choose_space(["--port", "80", "--model", model])


@pytest.mark.parametrize(
    "option",
    ["--kv-cache-memory-bytes=1", "--gpu-memory-utilization", "--gpu_memory_utilization=.5", "--config"],
)
def test_a_choice_of_the_user_stays(machine, monkeypatch, tmp_path, option):
    machine(32)
    (tmp_path / "vllm.yaml").write_text("gpu-memory-utilization: 0.5\n")
    assert choose_space(["MODEL", option, str(tmp_path / "vllm.yaml")]) is None
    assert SPACE not in cpu_memory.os.environ
    monkeypatch.setenv(SPACE, "3")
    assert choose_space(["MODEL"]) is None
    assert cpu_memory.os.environ[SPACE] == "3"


def test_a_gpu_has_its_own_memory(machine, monkeypatch):
    machine(32)
    monkeypatch.setattr(cpu_memory, "is_cpu_build", lambda: False)
    assert choose_space(["MODEL"]) is None


def test_serve_says_in_one_line_what_it_has_chosen(machine, monkeypatch, capsys):
    machine(64)
    monkeypatch.setattr(vllm_commands, "core_left_free", lambda: None)
    monkeypatch.setattr(vllm_commands, "_run", lambda *_: None)
    vllm_commands.serve(SimpleNamespace(args=["MODEL"]))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vllm-sparse: {SPACE}=8: ")
    monkeypatch.delenv(SPACE)
    vllm_commands.bench(SimpleNamespace(args=["serve", "--model", "MODEL"]))
    assert SPACE not in cpu_memory.os.environ  # it starts no engine
    vllm_commands.bench(SimpleNamespace(args=["throughput", "--model", "MODEL"]))
    assert cpu_memory.os.environ[SPACE] == "8"


@pytest.mark.parametrize("form", [["--attention-backend", "nope"], ["--attention_backend=nope"]])
def test_an_unknown_backend_is_refused_with_our_names(monkeypatch, capsys, form):
    monkeypatch.setattr(vllm_commands, "_run", lambda *_: pytest.fail("vLLM was started"))
    monkeypatch.setattr(sys, "argv", ["vllm-sparse", "serve", "MODEL", *form])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: attention_backend: got 'nope', allowed: unique, quest, ")
    assert line.endswith(", or a backend of vLLM's own")


@pytest.mark.parametrize("name", ["UNIQUE", "quest", "flash_attn", "CPU_ATTN"])
def test_our_names_and_those_of_vllm_are_passed_on(monkeypatch, name):
    passed = []
    monkeypatch.setenv(SPACE, "1")
    monkeypatch.setattr(vllm_commands, "_run", lambda _, context: passed.append(context.args))
    vllm_commands.serve(SimpleNamespace(args=["MODEL", "--attention-backend", name]))
    assert passed == [["MODEL", "--attention-backend", name]]


def test_a_refusal_has_the_form_of_all_others():
    with pytest.raises(ConfigurationError, match=r"^attention_backend: got 'x', allowed: "):
        vllm_commands.expect_backend("x")


@pytest.mark.parametrize(
    ("preset", "backend"), [("unique_paper", "unique"), ("mean", "unique"), ("zipvl_paper", "zipvl")]
)
def test_a_preset_that_is_no_backend_is_refused_with_its_options(preset, backend):
    with pytest.raises(ConfigurationError) as refusal:
        vllm_commands.expect_backend(preset)
    settings = f'{{"sparse_attention": {{"preset": "{preset}"}}}}'
    assert str(refusal.value) == (
        f"attention_backend: got {preset!r}, allowed: --attention-backend {backend} --additional-config '{settings}'"
    )


def test_vllm_handles_signals_by_itself(monkeypatch):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    seen = []
    monkeypatch.setenv(SPACE, "1")
    monkeypatch.setattr(
        vllm_commands, "_run", lambda *_: seen.extend(map(signal.getsignal, (signal.SIGINT, signal.SIGTERM)))
    )
    monkeypatch.setattr(sys, "argv", ["vllm-sparse", "serve", "MODEL"])
    with pytest.raises(SystemExit):
        main()
    assert seen == handlers
