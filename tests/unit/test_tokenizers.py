"""Texts begin with `bos` in every tool where the model was trained so, whatever its tokenizer says."""

import json
from pathlib import Path

import pytest

from vllm_sparse_plugin.tools.arguments import open_tokenizer
from vllm_sparse_plugin.tools.eval.items import Prompter
from vllm_sparse_plugin.tools.models import load_tokenizer
from vllm_sparse_plugin.tools.training.data import read_documents

MODEL = Path(__file__).parents[2] / "models" / "needle-8m"
BOS = 0


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model whose tokenizer adds nothing, as conversions from GGUF leave it."""
    content = json.loads((MODEL / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    describe(tmp_path)
    return tmp_path


def describe(folder: Path, model_type: str = "llama", **of_tokenizer: object) -> None:
    given = json.loads((MODEL / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(given | of_tokenizer))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


@pytest.mark.parametrize(
    ("model_type", "of_tokenizer", "begins"),
    [
        ("llama", {}, False),
        ("llama", {"add_bos_token": False}, False),
        ("llama", {"add_bos_token": True}, True),
        ("gemma3_text", {}, True),
        ("gemma3", {}, True),
        ("gemma3_text", {"add_bos_token": False}, False),
        ("llama", {"add_bos_token": True, "bos_token": None}, False),
    ],
)
def test_bos_begins_texts_where_the_model_needs_it(folder, model_type, of_tokenizer, begins):
    describe(folder, model_type, **of_tokenizer)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.encode("x = 1")[0] == BOS) == begins
    assert tokenizer.encode("x = 1", add_special_tokens=False)[0] != BOS
    assert Prompter(tokenizer).begin == ([BOS] if begins else [])


def test_a_tokenizer_that_adds_it_adds_it_once():
    assert load_tokenizer(MODEL).encode("x = 1").count(BOS) == 1


def test_a_saved_tokenizer_keeps_it(folder, tmp_path):
    describe(folder, "gemma3_text")
    load_tokenizer(folder).save_pretrained(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode("x = 1")[0] == BOS


def test_prompts_documents_and_training_begin_with_it(folder, tmp_path):
    describe(folder, "gemma3_text")
    tokenizer = open_tokenizer(folder)
    prompter = Prompter(tokenizer)
    assert prompter.encode("x = 1")[0] == prompter.split("x =", " 1")[0][0] == BOS
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(json.dumps(row) + "\n" for row in ({"text": "x = 1"}, {"prompt": "x", "completion": " = 1"}))
    )
    for document in read_documents(data, tokenizer):
        assert [token for token in document.tokens if token == BOS] == document.tokens[:1]


def test_no_tool_opens_a_tokenizer_by_itself():
    root = MODEL.parents[1]
    opening = [
        str(path.relative_to(root))
        for part in ("vllm_sparse_plugin", "bench")
        for path in (root / part).rglob("*.py")
        if "AutoTokenizer.from_pretrained" in path.read_text(encoding="utf-8")
    ]
    assert sorted(opening) == [
        "vllm_sparse_plugin/tools/fetching.py",  # converts one
        "vllm_sparse_plugin/tools/models.py",
    ]
