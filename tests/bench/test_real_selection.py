"""The study of two levels and of copies of pages, on tiny models with random weights and on drawn keys."""

import json

import pytest
import torch
from sparse_kernels.page_score import reference
from sparse_kernels.page_statistics import KINDS, StatisticsLayout, update_page_statistics
from sparse_kernels.paging import PagedTensor
from support.gemma import WINDOW, save_gemma
from support.llama import save_llama
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from research.real import __main__ as commands
from research.real import selection
from research.real.copies import count_misses
from research.real.model import Cache, Llama, causal_weights, read
from research.real.pages import PAGE, Layer
from research.real.report import tables
from research.real.texts import Prompt, read_prompts, text_prompts, write_prompts
from vllm_sparse_plugin.errors import ConfigurationError

TOKENS = 300


def _tokens(seed: int, count: int = TOKENS) -> list[int]:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def gemma_folder(tmp_path_factory):
    return save_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module", params=["llama", "gemma", "yarn"])
def folder(request, gemma_folder, tmp_path_factory):
    if request.param == "gemma":
        return gemma_folder
    folder = save_llama(tmp_path_factory.mktemp(request.param), 2048)
    if request.param == "yarn":
        config = LlamaConfig.from_pretrained(folder)
        config.rope_parameters = {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
        }  # fmt: skip
        LlamaForCausalLM.from_pretrained(folder, config=config).save_pretrained(folder)
    return folder


def test_captured_queries_and_keys_make_the_weights_of_transformers(folder):
    model, tokens, newest = Llama.load(folder, "cpu", torch.float32), _tokens(0), 40
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    expected = theirs(torch.tensor([tokens]), output_attentions=True)
    for end, layers, hidden in selection.capture(model, tokens, [30, 200, TOKENS], newest):
        rows = torch.arange(max(end - newest, 0), end)
        torch.testing.assert_close(model.logits(hidden), expected.logits[0, rows], rtol=1e-4, atol=1e-4)
        assert [each.layer for each in layers] == [at for at, window in enumerate(model.windows) if window is None]
        for each in layers:
            weights = causal_weights(each.query, each.keys, model.scale, rows).flatten(0, 1)
            of_layer = expected.attentions[each.layer][0, :, rows, :end]
            torch.testing.assert_close(weights, of_layer, rtol=1e-3, atol=1e-5)


def test_layers_of_a_gemma_have_windows(gemma_folder):
    assert Llama.load(gemma_folder, "cpu", torch.float32).windows == [WINDOW, None, WINDOW]


def test_scaled_positions_other_than_yarn_are_refused(tmp_path):
    path = save_llama(tmp_path, 64) / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match="got scaled positions, allowed: plain ones, or YaRN"):
        Llama.load(tmp_path, "cpu", torch.float32)


def test_a_gemma_serves_one_study(gemma_folder, tmp_path):
    prompts = tmp_path / "prompts.gz"
    write_prompts(prompts, [Prompt("prose", "prose/0", TOKENS, _tokens(0))])
    arguments = ["run", "--model", str(gemma_folder), "--prompts", str(prompts), "--output", str(tmp_path / "x.jsonl")]
    result = CliRunner().invoke(commands.app, [*arguments, "--study", "pages,selection"])
    assert isinstance(result.exception, ConfigurationError)
    assert "got 'pages,selection' for a model with windows, allowed: selection" in str(result.exception)


@pytest.mark.parametrize("kind", ["quarters", "leveled_quarters"])
def test_records_and_scores_are_those_of_a_cache(kind):
    pages, block = 2100, selection.BLOCK_PAGES * PAGE
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, pages * PAGE + 3, 32, generator=generator)
    query = torch.randn(4, 3, 32, generator=generator)
    complete = torch.tensor([pages, pages, 2050])
    layout = StatisticsLayout(PAGE, 32, "int4", kind=KINDS[kind])
    blocks = -(-keys.shape[1] // block)
    cache = torch.zeros(blocks, 2, block + layout.rows(block), 64, dtype=torch.bfloat16)
    padded = torch.nn.functional.pad(keys, (0, 0, 0, blocks * block - keys.shape[1]))
    cache[:, :, :block, :32] = padded.unflatten(1, (blocks, block)).transpose(0, 1)
    statistics = layout.views(cache[:, :, block:], block)
    everywhere = torch.arange(blocks * selection.BLOCK_PAGES)
    update_page_statistics(
        PagedTensor.from_rows(cache[:, :, :block, :32], PAGE), statistics,
        everywhere // selection.BLOCK_PAGES, everywhere % selection.BLOCK_PAGES,
    )  # fmt: skip
    grouped = query.bfloat16().unflatten(0, (2, 2)).permute(2, 0, 1, 3)
    expected = reference.score_pages(grouped, statistics, torch.arange(blocks).expand(3, -1), complete, 0.0, 0.25)
    found = selection.scores_of(selection.stored(kind, keys), query, complete, 0.25)
    assert (expected == -torch.inf).equal(found == -torch.inf)
    assert (expected[:2] == -torch.inf).any() == (kind == "leveled_quarters")
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-3)


def test_weights_of_selected_pages_are_true_weights():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 2100 * PAGE + 3, 32, generator=generator)
    # Queries near single keys, whose pages hold much of the weight.
    near = torch.randint(0, 2000 * PAGE, (selection.QUERIES,), generator=generator)
    query = (keys[:, near] * 2).repeat_interleave(2, dim=0)
    rows = list(selection.measure_levels(selection.Captured(0, query, keys), 0.3))
    mass = {(row["ranked_by"], row["refined"], row["pages"]): row["mass"] for row in rows}
    scored = {(row["ranked_by"], row["refined"]): row["scored"] for row in rows}
    shared = {(row["ranked_by"], row["refined"], row["pages"]): row["shared"] for row in rows}
    assert len(rows) == 6 * len(selection.BUDGETS)
    layer = Layer.of(query, keys, 0.3)
    complete = layer.complete
    pages = selection.chosen(
        selection.scores_of(selection.stored("quarters", keys), query, complete, 1.0), complete, 64
    )
    weights = causal_weights(query, keys, 0.3, torch.arange(keys.shape[1] - selection.QUERIES, keys.shape[1]))
    of_page = weights.mean(dim=1)[..., : 2100 * PAGE].unflatten(-1, (2100, PAGE)).sum(dim=-1).transpose(0, 1)
    # The incomplete page is read, too: the tokens from the complete pages on.
    expected = of_page.gather(-1, pages).sum(dim=-1)
    for row, count in enumerate(complete.tolist()):
        expected[row] += weights[:, :, row, count * PAGE :].sum(dim=-1).mean(dim=1)
    assert mass["quarters", 1.0, 64] == pytest.approx(expected.mean().item(), abs=1e-4)
    for budget in selection.BUDGETS:
        assert mass["oracle", 1.0, budget] >= max(value for (_, _, size), value in mass.items() if size == budget)
        assert shared["quarters", 1.0, budget] == pytest.approx(1.0)
        assert 0.3 < shared["leveled_quarters", 0.5, budget] <= shared["leveled_quarters", 1.0, budget] < 1
    assert scored["leveled_quarters", 1.0] == 1
    assert scored["leveled_quarters", 0.5] == pytest.approx(0.5, abs=0.05)


def _misses(pages: torch.Tensor, places: int) -> torch.Tensor:
    """The misses of one cache of one set. Of pages that the same step read last, the first place is replaced."""
    held, last, missed = [None] * places, [-1] * places, []
    for step, row in enumerate(pages.tolist()):
        missed.append(0)
        for page in row:
            if page in held:
                last[held.index(page)] = step
                continue
            missed[-1] += 1
            oldest = last.index(min(last))
            if last[oldest] < step:
                held[oldest], last[oldest] = page, step
    return torch.tensor(missed)


@pytest.mark.parametrize("places", [4, 6, 12, 40])
def test_copies_are_replaced_that_are_unread_longest(places):
    generator = torch.Generator().manual_seed(places)
    pages = torch.stack([torch.randperm(20, generator=generator)[:6] for _ in range(120)]).unflatten(0, (2, 60))
    found = count_misses(pages, 1, places)
    assert found.equal(torch.stack([_misses(each, places) for each in pages]))
    assert (found.sum(dim=1) == 20).all() == (places == 40)


def test_a_set_holds_few_pages():
    # One set of two places: three pages in turn never find themselves, two do.
    assert count_misses(torch.tensor([[[1], [2], [3]] * 5]), 1, 2).sum() == 15
    assert count_misses(torch.tensor([[[1], [2]] * 5]), 1, 2).sum() == 2
    # A step that reads more pages than its set holds reads the others from the host.
    assert count_misses(torch.tensor([[[1, 2, 3]] * 5]), 1, 2).tolist() == [[3, 1, 1, 1, 1]]
    # Padding is no page. With more sets, pages are in different ones.
    assert count_misses(torch.tensor([[[1, -1], [1, -1]]]), 1, 2).tolist() == [[1, 0]]
    assert count_misses(torch.arange(64).expand(1, 3, -1), 64, 8)[0, 1:].sum() == 0


def test_copies_of_all_pages_miss_new_pages_alone(monkeypatch):
    monkeypatch.setattr(selection, "READ_BUDGETS", (5, 200))
    generator = torch.Generator().manual_seed(0)
    keys, query = torch.randn(2, 1600, 32, generator=generator), torch.randn(4, 640, 32, generator=generator)
    rows = list(selection.measure_copies([selection.Captured(0, query, keys)] * 2))
    assert len(rows) == 2 * 4 * 2
    shares = {(row["budget_tokens"], row["multiple"], row["ways"] == 8): row for row in rows}
    # A step reads all pages: only those that were completed since then are new.
    whole = shares[1600, 1, False]
    assert whole["steady"] == pytest.approx(64 / sum((960 + 128 + n + 1) // PAGE for n in range(512)), rel=1e-3)
    assert whole["again"] == 0
    for name in ("cold", "steady", "again"):
        falling = [shares[40, multiple, False][name] for multiple in (1, 2, 4, 8)]
        assert falling == sorted(falling, reverse=True)
        assert falling[0] > falling[-1]


@pytest.mark.parametrize("arm", [*selection.ARMS, ""])
def test_rows_of_a_text(folder, arm):
    model, text = Llama.load(folder, "cpu", torch.float32), Prompt("prose", "prose/0", TOKENS, _tokens(3))
    rows = json.loads(json.dumps(list(selection.measure_selection(model, [text], [arm], [80, 4096]))))
    assert {row["context_tokens"] for row in rows[:-1]} == {80, TOKENS}
    assert rows[-1]["seconds"] >= 0
    titles = {"levels": ["Loss", "Weight in two levels"], "copies": ["Loss", "Pages without a copy"], "": ["Loss"]}
    assert [table.title for table in tables(rows)] == titles[arm]
    if not any(model.windows):
        logits = model.logits(read(model, torch.tensor(text.tokens), Cache(model, TOKENS)))
        losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(text.tokens[1:]), reduction="none")
        found = [row["nats"] for row in rows if row.get("arm") == "loss"]
        assert found == pytest.approx([losses[:79].mean().item(), losses.mean().item()], abs=1e-3)


class _Tokenizer:
    """It has no chat template."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [2] * add_special_tokens + [ord(letter) for letter in text]


def test_texts_begin_as_the_tokenizer_begins_them():
    found = list(text_prompts(_Tokenizer(), "prose", "abcdefgh", 4, 2))
    assert [each.tokens for each in found] == [[2, 97, 98, 99], [2, 101, 102, 103]]


def test_texts_are_prepared_without_questions(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "open_tokenizer", lambda _: _Tokenizer())
    monkeypatch.setattr(commands, "library_text", lambda *_: "0123456789")
    (tmp_path / "prose.txt").write_text("abcdefgh")
    arguments = {"model": "x", "output": tmp_path / "out.gz", "prose": tmp_path / "prose.txt", "contexts": 4}
    options = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    result = CliRunner().invoke(commands.app, ["prepare", *options, "--texts", "1", "--tasks", ""])
    assert result.exit_code == 0, result.output
    assert [each.name for each in read_prompts(tmp_path / "out.gz")] == ["prose/4/0", "code/4/0"]
