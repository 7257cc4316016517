"""Every command ends with one sentence for every input that it cannot use, and writes nothing."""

import json
import shutil
from pathlib import Path

import pytest
from support.mistakes import CONTENTS, MODEL, RESULTS, WHOLE, put, sentence_of

INPUTS: dict[str, tuple[list[str], str]] = {
    "diagnose --prompts": (["diagnose"], "prompts"),
    "calibrate --prompts": (["calibrate"], "prompts"),
    "anchors --prompts": (["anchors"], "prompts"),
    "tune --prompts": (["tune", "--model", str(MODEL)], "prompts"),
    "train --data": (["train", "--output", "new"], "data"),
    "eval --completions": (["eval", "--in-process", "--model", str(MODEL), "--output", "new"], "completions"),
    "eval --text": (["eval", "--in-process", "--model", str(MODEL), "--output", "new"], "text"),
    "eval show": (["eval", "show"], ""),
    "eval compare": (["eval", "compare", "good.jsonl"], ""),
    "eval compare --again": (["eval", "compare", "good.jsonl", "good.jsonl"], "again"),
}
"""Commands that read a file, and the option that names it; empty for an argument."""
BAD_MODELS: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "half-written": b'{"num_hidden_layers": 2, ',
    "not UTF-8": b'{"model_type": "\xff"}',
    "a list": b"[1]",
    "nested": b'{"a":' * 100_000,
    "numbers that are none": b'{"max_position_embeddings": 1e999, "num_hidden_layers": 0, "num_attention_heads": 0}',
}
"""Bad contents of a model's config.json."""


ANY_TEXT_WILL_DO = [("eval --text", mistake) for mistake in ("half-written", "a lone surrogate", "nested")]


@pytest.mark.parametrize(
    ("case", "mistake"),
    [
        (case, mistake)
        for case in INPUTS
        for mistake in (*CONTENTS, "a folder", "endless")
        if (case, mistake) not in ANY_TEXT_WILL_DO
    ],
)
def test_a_file_that_cannot_be_used(run, case, mistake):
    command, option = INPUTS[case]
    put("good.jsonl", RESULTS)
    if "--file" in command:
        record = {"dataset": "trec", "context": "x", "input": "y", "answers": ["z"], "all_classes": ["z"]}
        Path("good.jsonl").write_text(json.dumps(record) + "\n")
    bad = Path("/dev/zero") if mistake == "endless" else put("bad", CONTENTS.get(mistake))
    if mistake == "a folder":
        bad.mkdir()
    before = sorted(path.name for path in Path().iterdir())
    named = [f"--{option}", str(bad)] if option else [str(bad)]
    said = sentence_of(run(*command, *named))
    field = "results" if option in ("", "again") else option
    assert said.startswith(f"{field}: got "), said
    assert ", allowed: " in said
    assert sorted(path.name for path in Path().iterdir()) == before


CONFIGURED = {
    "show-config": ["show-config"],
    "plan": ["plan"],
    "needles": ["needles"],
    "diagnose": ["diagnose", "--prompts", "good.jsonl"],
    "train": ["train", "--data", "good.jsonl", "--output", "new"],
    "eval": ["eval", "--in-process", "--model", str(MODEL), "--output", "new", "--attention-backend", "unique"],
}
"""Commands that read the YAML file that `config` names."""


@pytest.mark.parametrize("mistake", [*(name for name in CONTENTS if name != "empty"), "a folder", "endless"])
@pytest.mark.parametrize("command", CONFIGURED)
def test_settings_that_cannot_be_used(run, command, mistake):
    put("good.jsonl", WHOLE.encode() * 2)
    bad = Path("/dev/zero") if mistake == "endless" else put("bad", CONTENTS.get(mistake))
    if mistake == "a folder":
        bad.mkdir()
    before = sorted(path.name for path in Path().iterdir())
    settings = json.dumps({"sparse_attention": {"config": str(bad)}})
    said = sentence_of(run(*CONFIGURED[command], "--additional-config", settings))
    assert said.startswith("sparse_attention") or f"{bad}: got " in said
    assert ", allowed: " in said
    assert sorted(path.name for path in Path().iterdir()) == before


@pytest.mark.parametrize(
    ("command", "mistake"),
    [
        (command, mistake)
        for command in ("show-config", "plan", "needles", "diagnose", "calibrate", "anchors", "train")
        for mistake in BAD_MODELS
        if (command, mistake) != ("show-config", "numbers that are none")  # it looks at no number
    ],
)
def test_a_model_whose_config_cannot_be_used(run, command, mistake):
    Path("model").mkdir()
    put("model/config.json", BAD_MODELS[mistake])
    data = put("data.jsonl", WHOLE.encode())
    more = ["--data", data, "--output", "new"] if command == "train" else []
    assert sentence_of(run(command, "--model", "model", *more)).startswith("model: got ")
    assert sorted(path.name for path in Path().iterdir()) == ["data.jsonl", "model"]


def damaged_model(part: str, content: bytes) -> Path:
    """A copy of needle-8m with one file replaced."""
    folder = Path("model")
    shutil.copytree(MODEL, folder)
    (folder / part).write_bytes(content)
    return folder


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
WEIGHTS = {"empty": b"", "a pointer of Git LFS": LFS, "truncated": (MODEL / "model.safetensors").read_bytes()[:5000]}


@pytest.mark.parametrize("mistake", WEIGHTS)
@pytest.mark.parametrize("command", ["diagnose", "calibrate", "anchors", "train"])
def test_weights_that_cannot_be_read(run, command, mistake):
    model = damaged_model("model.safetensors", WEIGHTS[mistake])
    texts = (f"x = {number}\n" * 2000 for number in (1, 2))
    lines = (json.dumps({"prompt": text, "completion": text}) + "\n" for text in texts)
    data = put("data.jsonl", "".join(lines).encode())
    arguments = {
        "diagnose": ["--prompts", data, "--json", "new"],
        "calibrate": ["--prompts", data, "--context", "1024", "--context", "2048", "--output", "new"],
        "anchors": ["--prompts", data, "--context", "2100", "--output", "new"],
        "train": ["--data", data, "--output", "new"],
    }[command]
    said = sentence_of(run(command, "--model", model, *arguments))
    assert said.startswith("model: got 'model' (")
    assert sorted(path.name for path in Path().iterdir()) == ["data.jsonl", "model"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"model": 1}', LFS], ids=["empty", "half", "other", "pointer"])
@pytest.mark.parametrize("command", ["diagnose", "calibrate", "anchors", "train", "eval"])
def test_a_tokenizer_that_cannot_be_read(run, command, content):
    model = damaged_model("tokenizer.json", content)
    data = put("data.jsonl", WHOLE.encode() * 2)
    arguments = {
        "diagnose": ["--prompts", data],
        "calibrate": ["--prompts", data],
        "anchors": ["--prompts", data],
        "train": ["--data", data, "--output", "new"],
        "eval": ["--completions", data, "--output", "new", "--in-process"],
    }[command]
    said = sentence_of(run(command, "--model", model, *arguments))
    assert said.startswith(("model: got ", "tokenizer: got "))
    assert said.endswith("a folder with a tokenizer")


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "banana", "", "meta"])
@pytest.mark.parametrize("command", ["diagnose", "calibrate", "anchors", "train"])
def test_a_device_that_is_not_there(run, command, device):
    more = ["--data", put("data.jsonl", WHOLE.encode()), "--output", "new"] if command == "train" else []
    said = sentence_of(run(command, "--device", device, *more))
    assert said == f"device: got {device!r}, allowed with this torch on this machine: cpu"


def test_a_configuration_of_another_model_is_not_measured(run):
    """Weights missing in the file would be random."""
    model = damaged_model("config.json", b"")
    config = json.loads((MODEL / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] + 1}))
    said = sentence_of(run("diagnose", "--model", model, "--prompts", put("data.jsonl", WHOLE.encode())))
    assert said.startswith("model: got 'model' without ")
    assert said.endswith("allowed: weights and a config.json of the same model")
