"""Text and JSON files that users give to commands."""

import codecs
import json
from pathlib import Path

import pytest

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.files import digest_of, read_json_lines, read_text


def test_lines_end_where_editors_end_them(tmp_path):
    """A byte order mark, Windows line ends and empty lines have no meaning. Other breaks are text."""
    path = tmp_path / "lines.jsonl"
    texts = ["a\u2028b", "c\x0bd\x85e", "\ufefff", "\U0001f600"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False).encode() for text in texts]
    lines.append(json.dumps({"prompt": texts[-1]}).encode())  # two escaped halves of one character
    path.write_bytes(codecs.BOM_UTF8 + b"\r\n\r\n".join(lines))
    found = list(read_json_lines(path, "prompts"))
    assert [value["prompt"] for _, _, value in found] == [*texts, texts[-1]]
    assert [number for number, _, _ in found] == [1, 3, 5, 7, 9]
    assert found[0][1] == '{"prompt": "a\u2028b"}'


def test_what_is_no_json_has_no_value(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text("{\n" + "[" * 100_000 + "\n1\n")
    assert [value for _, _, value in read_json_lines(path, "data")] == [None, None, 1]


@pytest.mark.parametrize("text", ['"\\ud800"', '{"\\udfff": 1}', '["a", {"b": ["\\ud83d"]}]', '"\\ude00\\ud83d"'])
def test_half_a_character_has_no_value(tmp_path, text):
    path = tmp_path / "x"
    path.write_text(f"1\n{text}\n")
    assert [value for _, _, value in read_json_lines(path, "data")] == [1, None]


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_sparse_plugin.tools.files.MOST_BYTES", 100)
    path = tmp_path / "x"
    path.write_text("a" * 101)
    for read in (lambda: read_text(path, "text", "text"), lambda: list(read_json_lines(path, "text"))):
        with pytest.raises(ConfigurationError, match=r"^text: got '.*' \(more than 0 GiB\), allowed: "):
            read()


def test_what_never_ends_is_no_text():
    with pytest.raises(ConfigurationError, match=r"^text: got '/dev/zero' \(no file of UTF-8 text\), allowed: text$"):
        read_text(Path("/dev/zero"), "text", "text")


def test_digests_tell_files_apart(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("a")
    other.write_text("b")
    assert digest_of(one) != digest_of(other)
    other.write_text("a")
    assert digest_of(one) == digest_of(other)
