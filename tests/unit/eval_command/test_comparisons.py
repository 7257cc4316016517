"""Results of several files in tables and pictures."""

import json
import math
import re

import pytest
from support.eval_command import MODEL, NEEDLES, cells, refused, rewrite

from vllm_sparse_plugin.tools.eval.results import read_results
from vllm_sparse_plugin.tools.needles import library_text


def test_results_side_by_side(run, output, tmp_path):
    run(*NEEDLES)
    other, picture = tmp_path / "other.jsonl", tmp_path / "scores.svg"
    rewrite(output, other, "theirs", **{"multikey/4096/1": 0})
    code, out, err = run("show", str(output), str(other), "--plot", str(picture), base=())
    assert (code, err) == (0, "")
    assert cells(out, "multikey") == ["multikey", "4,096", "4", "1.000 [-]", "0.750 [-]"]
    drawn = picture.read_text()
    assert all(f"<!-- {name} -->" in drawn for name in ("mine", "theirs", "multikey", "4K"))


def test_the_share_of_the_cache_that_was_read_is_shown_where_it_is_known(run, output, tmp_path):
    run(*NEEDLES)
    assert "bytes read" not in run("show", str(output), base=())[1]
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    for line, share in zip(lines[1:], (0.5, 0.25, 0.5, 0.25), strict=True):
        line["kv_read_share"] = share
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = run("show", str(output), str(other), base=())[1]
    assert cells(out, "multikey")[3:] == ["1.000 [-]", "1.000 [-]", "37.5%"]
    lines[2]["kv_read_share"] = None
    other.write_text("".join(json.dumps(line) + "\n" for line in lines))
    # A mean of some of the answers would be that of others.
    assert "bytes read" not in run("show", str(other), base=())[1]


def test_a_comparison_on_the_same_items(run, output, tmp_path):
    run(*NEEDLES)
    other = tmp_path / "other.jsonl"
    rewrite(output, other, "theirs", **{"multikey/4096/1": 0, "multikey/4096/2": 0})
    code, out, err = run("compare", str(output), str(other), base=())
    assert (code, err) == (0, "")
    # One document says nothing about others.
    assert cells(out, "multikey")[:5] == ["multikey", "4,096", "4", "1.000", "0.500"]
    assert cells(out, "multikey")[5] == "-0.500 [-]"
    assert cells(out, "multikey")[6] == "1.000"
    # Only shared items are compared.
    other.write_text("".join(other.read_text().splitlines(keepends=True)[:3]))
    assert cells(run("compare", str(output), str(other), base=())[1], "multikey")[2] == "2"


def test_a_ratio_of_perplexities(run, stub, output, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(library_text(0, 60_000))
    run("--text", str(text), "--context", "2048", "--questions", "2", "--scored-tokens", "8")
    other = tmp_path / "other.jsonl"
    rewrite(output, other, "theirs", **{f"perplexity/2048/{i}": 0.6 for i in range(2)})
    out = run("compare", str(output), str(other), base=())[1]
    ratio = f"{math.exp(0.1):.3f}"
    assert cells(out, "perplexity")[5] == f"{ratio} [{ratio}, {ratio}]"


def lines_of(out: str) -> list[list[str]]:
    """Cells of the table of next tokens."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    return [row for row in rows if row[0] == "2,048"]


def test_next_tokens_of_the_same_text_are_compared(run, stub, output, tmp_path):
    text, other = tmp_path / "text.txt", tmp_path / "other.jsonl"
    text.write_text(library_text(0, 60_000))
    options = ("--text", str(text), "--context", "2048", "--questions", "2", "--scored-tokens", "4")
    base = ("--base-url", stub.url, "--tokenizer", str(MODEL), "--output")
    half = math.log(0.5)
    stub.predictions = [{7: half, 9: math.log(0.4), 11: -20.0}, {7: 0.0}, {8: half, 9: half}, {1: -20.0}]
    assert run(*options, base=(*base, str(output)))[0] == 0
    # The likeliest token is always kept; other tokens only if they matter.
    kept = read_results(output).results["perplexity/2048/0"].predictions
    assert [list(at) for at in kept] == [[7, 9], [7], [8, 9], [1]]
    stub.predictions = [{9: half, 7: math.log(0.4)}, {7: 0.0}, {9: half, 8: half}, {2: 0.0}]
    assert run(*options, base=(*base, str(other)))[0] == 0
    out = run("compare", str(output), str(other), base=())[1]
    # The second and third position have the same most likely token. Both windows have the same shares, which does not
    # make them certain.
    unmeasured = [["0.500 [0.095, 0.905]", "not measured", "not measured"]]
    assert [line[4:] for line in lines_of(out) if line[1] == "same most likely token"] == unmeasured
    assert "of stub is not measured" in out
    again = tmp_path / "again.jsonl"
    stub.predictions = [{7: half, 9: math.log(0.4)}, {7: 0.0}, {8: half, 9: half}, {2: 0.0}]
    assert run(*options, "--other-batches", base=(*base, str(again)))[0] == 0
    assert read_results(again).settings["other_batches"] is True
    out = run("compare", str(output), str(other), "--again", str(again), base=())[1]
    assert "of stub is not measured" not in out
    # Overlaps .8 and, but for what lists leave, .1 at the first position, then 1, 1 and 0.
    found = {line[1]: [float(cell.split()[0]) for cell in line[4:]] for line in lines_of(out)}
    assert found["same most likely token"] == [0.5, 0.75, 0.25]
    assert found["overlap of the distributions"] == pytest.approx([0.725, 0.75, 0.025], abs=2e-3)
    assert found["Kullback-Leibler divergence, nats"][2] == pytest.approx(0.25 * 0.1 * math.log(0.5 / 0.4), abs=2e-3)
    rewrite(output, other, "theirs")
    other.write_text(re.sub(r'"predictions": \[[^\]]*\]', '"predictions": []', other.read_text()))
    assert "Next tokens" not in run("compare", str(output), str(other), base=())[1]


def test_files_of_other_questions_are_not_compared(run, output, tmp_path):
    run(*NEEDLES)
    other = tmp_path / "other.jsonl"
    lines = output.read_text()
    other.write_text(re.sub(r'"digest":"\w+"', '"digest":"0"', lines))
    assert refused(run("compare", str(output), str(other), base=())) == (
        f"results: got {str(output)!r} and {str(other)!r}, whose item multikey/4096/0 differs, allowed: runs with the "
        "same tokenizer, seed and files"
    )
    other.write_text(lines.replace("multikey/4096", "multikey/5000"))
    assert "without an item in common, allowed: runs of" in refused(run("compare", str(output), str(other), base=()))
