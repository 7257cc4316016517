"""The study: its pipeline beside the references decoding token by token, its records, its files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from sparse_kernels.batch import QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.page_score.reference import score_pages
from sparse_kernels.page_statistics import KINDS, StatisticsLayout
from sparse_kernels.page_statistics.codes import finite_words
from sparse_kernels.page_statistics.reference import summarise, update_page_statistics
from sparse_kernels.page_topk.reference import select_pages
from sparse_kernels.paging import PagedTensor
from sparse_kernels.sparse_attention.reference import attend_pages
from support.llama import GROUP, HEAD_SIZE, KV_HEADS, LAYERS, save_llama
from transformers import AttentionInterface, AutoModelForCausalLM

from bench.common.models import NEEDLE_8M, load_tokenizer
from research.study import data, plan, run
from research.study.documents import load_documents
from research.study.pipeline import Decoder
from research.study.scores import Interval, Mean, Moments, Oracle, Parts, TwoLevel, pack, unpack
from research.study.settings import Setting, Stress
from vllm_sparse_plugin.errors import ConfigurationError

BLOCK = 64
DOCUMENT = 203
TAILS = (37, 21)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_llama(tmp_path_factory.mktemp("model"), longest=512)


@pytest.fixture(scope="module")
def decoder(folder) -> Decoder:
    return Decoder(folder)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class OneByOne:
    """Decodes with the references, a token at a time, from a paged cache."""

    def __init__(self, folder: Path, prefix, setting: Setting) -> None:
        AttentionInterface.register("one by one", self.attention)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="one by one", dtype=torch.float32
        ).eval()
        self.setting, self.pages = setting, []
        self.layout = StatisticsLayout(setting.page_size, HEAD_SIZE, setting.score.format)
        blocks = 512 // BLOCK
        rows = BLOCK + self.layout.rows(BLOCK)
        self.caches = [torch.zeros(blocks, KV_HEADS, rows, 2 * HEAD_SIZE, dtype=torch.bfloat16) for _ in range(LAYERS)]
        self.table = torch.arange(blocks)[None]
        self.length = 0
        for position in range(prefix.num_tokens):
            for layer in range(LAYERS):
                self.write(layer, position, prefix.keys[layer][:, position], prefix.values[layer][:, position])

    def write(self, layer: int, position: int, key: torch.Tensor, value: torch.Tensor) -> None:
        cache, size = self.caches[layer], self.setting.page_size
        block, slot = divmod(position, BLOCK)
        cache[block, :, slot] = torch.cat([key, value], dim=-1)
        if slot % size == size - 1:
            statistics = self.layout.views(cache[:, :, BLOCK:], BLOCK)
            update_page_statistics(
                self.paged(layer)[0], statistics, torch.tensor([block]), torch.tensor([slot // size])
            )

    def paged(self, layer: int) -> tuple[PagedTensor, PagedTensor]:
        rows = self.caches[layer][:, :, :BLOCK]
        parts = rows[..., :HEAD_SIZE], rows[..., HEAD_SIZE:]
        return tuple(PagedTensor.from_rows(part, self.setting.page_size) for part in parts)

    def attention(self, module, query, key, value, attention_mask, **kwargs):
        layer, setting = module.layer_idx, self.setting
        self.write(layer, self.length, key[0, :, 0].bfloat16(), value[0, :, 0].bfloat16())
        keys, values = self.paged(layer)
        grouped = query[0, :, 0].view(1, KV_HEADS, GROUP, HEAD_SIZE)
        context = torch.tensor([self.length + 1])
        complete = context // setting.page_size
        statistics = self.layout.views(self.caches[layer][:, :, BLOCK:], BLOCK)
        scores = score_pages(grouped, statistics, self.table, complete, setting.score.weight)
        pages = select_pages(scores, complete, setting.budget_pages, setting.sink_pages, setting.recent_pages)
        self.pages.append(pages[0])
        tokens = QueryTokens(grouped, self.table, context)
        output = attend_pages(tokens, KVCache(keys, values), pages, Softmax(HEAD_SIZE**-0.5))
        return output.view(1, 1, KV_HEADS * GROUP, HEAD_SIZE), None

    @torch.inference_mode()
    def decode(self, tail: list[int], begin: int) -> torch.Tensor:
        logits = []
        for i, token in enumerate(tail):
            self.length = begin + i
            position = torch.tensor([[self.length]])
            logits.append(self.model(torch.tensor([[token]]), position_ids=position, use_cache=False).logits[0, 0])
        return torch.stack(logits)


@pytest.mark.parametrize(
    ("score", "page_size"),
    [(Mean("int8", 0.75), 8), (Mean("bf16", 2.0), 8), (Mean("fp8", 1.0), 16), (Mean("int8", 0.0), 4)],
    ids=lambda value: getattr(value, "label", value),
)
def test_decode_selects_and_says_what_the_references_do_token_by_token(folder, decoder, monkeypatch, score, page_size):
    setting = Setting(score, page_size, budget_tokens=6 * page_size)
    selected = []

    def record(*args):
        selected.append(select(*args))
        return selected[-1]

    select = Decoder._select
    monkeypatch.setattr(Decoder, "_select", staticmethod(record))
    prefix = decoder.prefill(tokens(DOCUMENT, 0))
    tails = [tokens(length, 7 + length) for length in TAILS]
    decoded = decoder.decode(prefix, tails, setting)
    for i, tail in enumerate(tails):
        one_by_one = OneByOne(folder, prefix, setting)
        logits = one_by_one.decode(tail, DOCUMENT)
        for layer in range(LAYERS):
            ours = selected[layer].unflatten(0, (len(tails), -1))[i, : len(tail)]
            assert torch.equal(ours, torch.stack(one_by_one.pages[layer::LAYERS]))
        likely = logits[:-1].log_softmax(dim=-1).gather(1, torch.tensor(tail[1:])[:, None]).squeeze(1)
        # A key or value that lies between two bfloat16 may be stored as either.
        torch.testing.assert_close(decoded.log_probability[i, : len(tail) - 1], likely, rtol=0, atol=1e-2)
        assert (decoded.log_probability[i, : len(tail) - 1] - likely).abs().median() < 1e-4
        assert torch.equal(decoded.best[i, : len(tail)], logits.argmax(dim=-1))


@pytest.mark.parametrize("stress", get_args(Stress))
def test_a_budget_of_everything_is_dense(decoder, stress):
    prefix = decoder.prefill(tokens(DOCUMENT, 0))
    tails = [tokens(length, length) for length in TAILS]
    whole = decoder.decode(prefix, tails, Setting(Parts(4, 4), 8, 512, stress=stress))
    dense = decoder.decode(prefix, tails, Setting(stress=stress))
    for i, tail in enumerate(tails):
        ours, theirs = (each.log_probability[i, : len(tail) - 1] for each in (whole, dense))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_dense_decode_is_the_models_own(folder, decoder):
    document, tail = tokens(DOCUMENT, 0), tokens(TAILS[0], 1)
    decoded = decoder.decode(decoder.prefill(document), [tail], Setting())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([document + tail])).logits[0, DOCUMENT:]
    likely = logits[:-1].log_softmax(dim=-1).gather(1, torch.tensor(tail[1:])[:, None]).squeeze(1)
    # Keys and values are rounded to bfloat16 here, and not there; a wrong position changes it all.
    assert (decoded.log_probability[0] - likely).abs().mean() < 0.02 * likely.std()


def pages(page_size: int = 8, size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 50, page_size, size, generator=generator).bfloat16().float()
    return keys, torch.randn(2, 12, size, generator=generator)


def per_key(keys: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """`[heads, rows, pages, page_size]` logits."""
    return torch.einsum("hpbd,hrd->hrpb", keys, query)


def test_quest_bounds_every_product_from_its_definition():
    keys, query = pages()
    score = Interval(16)
    ends = torch.stack([keys.amin(dim=2), keys.amax(dim=2)])
    exact = (query[None, :, :, None] * ends[:, :, None]).amax(dim=0).sum(dim=-1)
    torch.testing.assert_close(score.score(query, score.summarise(keys)), exact, rtol=1e-4, atol=1e-3)


def test_moments_follow_their_formulas():
    keys, query = pages()
    mean, variance = keys.mean(dim=2), keys.var(dim=2, correction=0)
    product = torch.einsum("hpd,hrd->hrp", mean, query)
    spread = torch.einsum("hpd,hrd->hrp", variance, query.square())
    for score, exact in (
        (Moments("diag", 3.0, 8), product + 3 * spread.sqrt()),
        (Moments("gauss", 0.5, 8), product + 0.5 * spread / 8),
    ):
        found = score.score(query, score.summarise(keys))
        assert (found - exact).abs().mean() < 0.03 * exact.std()


def test_the_oracle_knows_the_largest_logit_and_the_mass():
    keys, query = pages()
    for score, exact in (
        (Oracle("logit"), per_key(keys, query).amax(dim=-1)),
        (Oracle("mass"), (per_key(keys, query) / 8).exp().sum(dim=-1).log() * 8),
        (Parts(8, 16), per_key(keys, query).amax(dim=-1)),
    ):
        torch.testing.assert_close(score.score(query, score.summarise(keys)), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("score", "error"),
    [(Parts(4, 4), 0.13), (Parts(4, 4, rotated=True), 0.13), (Parts(4, 2), 0.37), (Parts(8, 2, rotated=True), 0.37),
     (Parts(8, 1), 0.65), (Parts(2, 8), 0.02), (Parts(4, 2, base=True), 0.37)],
    ids=lambda value: getattr(value, "label", value),
)  # fmt: skip
def test_parts_in_few_bits_are_off_by_what_their_bits_explain(score, error):
    keys, query = pages()
    exact = Parts(score.count, 16)
    found, wanted = (each.score(query, each.summarise(keys)) for each in (score, exact))
    # The error of a product, in units of its own spread; the largest of several has less of both.
    spread = query.norm(dim=-1).mean() * (score.count / 8) ** 0.5
    assert 0.2 * error < (found - wanted).std() / spread < error


@pytest.mark.parametrize("fine", [Mean("bf16", 1.0), Interval(8), plan.PAIRS], ids=lambda score: score.label)
def test_coarse_pages_prune_what_fine_pages_would_choose_from(fine):
    keys, query = pages()
    coarse = Oracle("logit")
    score = TwoLevel(coarse, fine, ratio=4, share=0.25)
    found, whole = score.score(query, score.summarise(keys)), fine.score(query, fine.summarise(keys))
    best = per_key(keys, query)[:, :, :48].amax(dim=-1).unflatten(-1, (12, 4)).amax(dim=-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(3).indices, True)
    kept = torch.cat([kept.repeat_interleave(4, dim=-1), torch.ones_like(kept[..., :2])], dim=-1)
    assert torch.equal(found, whole.masked_fill(~kept, -torch.inf))


def test_no_stored_word_is_an_infinity_or_nan_and_no_code_moves_by_more_than_one():
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    kept = finite_words(words.view(torch.uint8))
    assert kept.view(torch.bfloat16).isfinite().all()
    regular = words.view(torch.bfloat16).isfinite()
    assert torch.equal(kept.view(torch.int16)[regular], words[regular])
    for bits in (1, 2, 4, 8):
        before, after = unpack(words.view(torch.uint8), bits).int(), unpack(kept, bits).int()
        assert (before - after).abs().max() == 1
        assert torch.equal(pack(before, bits), words.view(torch.uint8))


def test_records_of_the_candidates_are_two_bytes_per_element():
    for head_size in (64, 128):
        assert plan.PAIRS.record_bytes(8, head_size) == 2 * head_size
        assert plan.DIFFERENCES.record_bytes(8, head_size) == 2 * head_size
        assert plan.HALF.record_bytes(8, head_size) < Mean("int8").record_bytes(8, head_size)


@pytest.mark.parametrize(("score", "name"), [(plan.PAIRS, "quarters"), (plan.SKETCH, "sketch")])
def test_what_is_measured_is_what_is_served(score, name):
    keys, query = pages()
    found = score.score(query, score.summarise(keys))
    kind = KINDS[name]
    codes, steps = kind.codes.pack(summarise(kind, keys)[0])
    vectors = kind.codes.unpack(codes) * kind.codes.per_vector(steps.float()).unsqueeze(-1)
    products = torch.einsum("hqvd,hpvd->hqpv", kind.features(query, 0.0), vectors)
    # Where two codes would not be a finite word, either clears a lowest bit, and not in the same places.
    cleared = 2 * query.abs().amax() * steps.float().amax()
    assert (found - kind.combine(products)).abs().amax() <= cleared
    assert (found - kind.combine(products)).abs().median() < 1e-4 * found.abs().median()


def test_queries_of_a_group_agree_by_the_largest_score_or_by_their_softmax():
    scores = torch.tensor([[[[3.0, 1.0, 9.0], [0.0, 8.0, 9.0]]]])
    complete = torch.tensor([2])
    assert Setting(Mean()).of_group(scores, complete, 1)[..., :2].tolist() == [[[3.0, 8.0]]]
    shares = scores[..., :2].softmax(dim=-1)
    found = Setting(Mean(), group="softmax").of_group(scores, complete, 1)
    torch.testing.assert_close(found[..., :2].float(), shares.mean(dim=2), rtol=0.01, atol=0)
    assert found[0, 0, 2] == 0


def test_a_share_of_the_mass_cuts_the_worst_pages_only():
    setting = Setting(Mean(), 8, 64, group="softmax", mass=0.8)
    scores = torch.tensor([[[0.01, 0.5, 0.02, 0.4, 0.05, 0.02]]]).bfloat16()
    chosen = torch.tensor([[[0, 1, 2, 3, 4, 5, -1]]])
    assert setting.cut(chosen, scores, torch.tensor([6])).tolist() == [[[0, 1, -1, 3, -1, 5, -1]]]


def test_names_of_settings_are_unique():
    settings = {*plan._core(), *plan._text(), *plan._targets(), *plan._search(), *plan._stress(), *plan._lengths()}
    assert len({setting.name for setting in settings}) == len(settings) > 200


def needles(task: str, seed: int = 0, folder: Path | None = None):
    return load_documents(folder, load_tokenizer(NEEDLE_8M), task, 4096, 1, seed)


def test_documents_are_the_same_every_time_and_share_their_beginning(tmp_path):
    first, again, kept, read = (needles("kv", folder=where)[0] for where in (None, None, tmp_path, tmp_path))
    assert first == again == kept == read
    assert first != needles("kv", seed=1)[0]
    assert len(first.tails) == 8
    for tail in first.tails:
        assert len(first.tokens) + len(tail.tokens) <= 4096


def test_an_answer_is_right_only_as_a_whole():
    tokenizer = load_tokenizer(NEEDLE_8M)
    tail = needles("multiquery")[0].tails[0]
    end = tokenizer.encode("<|eos|>", add_special_tokens=False)[0]
    digit = tokenizer.encode("7", add_special_tokens=False)[0]
    best = [*tail.tokens[1:], end]
    assert tail.is_right(best, tokenizer)
    assert tail.is_right([*best, digit], tokenizer), "what follows the tail is padding"
    assert not tail.is_right([*tail.tokens[1:], digit], tokenizer)
    begin = len(tail.tokens) - tail.answer_tokens
    for i in range(begin - 1, len(tail.tokens) - 1):
        assert not tail.is_right([*best[:i], (best[i] + 1) % 4096, *best[i + 1 :]], tokenizer)


def test_a_run_goes_on_where_time_ended_it(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "TASKS", ("kv",))
    settings = (Setting(), Setting(Mean(), budget_tokens=64), Setting(plan.PAIRS, budget_tokens=64))
    stages = [
        plan.Stage("answers", (4096,), settings, tasks=("kv",)),
        plan.Stage("text", (4096,), settings[:1], of_text=True, tasks=("kv",)),
    ]
    output, folder = tmp_path / "raw.jsonl", tmp_path / "cache"

    def go_on(stages, time_limit=1e6):
        return run.measure(output, stages, 1, 0, "cpu", folder, (0, 1), time_limit, None)

    def rows():
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        return [line for line in lines if "setting" in line]

    assert not go_on(stages, time_limit=0)
    assert not rows()
    assert go_on([replace(stages[0], settings=settings[:2])])
    begun = rows()
    assert len(begun) == 2
    with output.open("a") as file:
        file.write('{"document": "kv-4096-0-0", "sett')
    assert go_on(stages)
    assert rows()[:2] == begun
    assert len(rows()) == len({(row["document"], row["setting"]) for row in rows()}) == 4
    assert {path.name for path in folder.iterdir()} == {"kv-4096-0-0.pt", "kv-4096-0x1.json"}

    collected = tmp_path / "collected.jsonl"
    data.collect_runs([output], collected)
    results = data.Results(collected)
    dense = results.cells[4096, False, "dense"]
    assert dense.answers == 8
    assert dense.loss.keys() == dense.right.keys() == {"kv-0"}
    assert len(results.cells) == 3

    alone, joined = tmp_path / "answers.jsonl", tmp_path / "joined.jsonl"
    lines = output.read_text().splitlines(keepends=True)
    alone.write_text("".join(line for line in lines if '"loss"' not in line))
    data.collect_runs([alone], alone)
    text = tmp_path / "text.jsonl"
    text.write_text("".join(line for line in lines if '"right"' not in line))
    data.collect_runs([alone, text], joined)
    assert data.Results(joined).cells == results.cells


def test_comparisons_are_paired():
    pytest.importorskip("scipy")
    ours = data.Cell("a", 1, right={f"kv-{i}": "1111" for i in range(6)})
    theirs = data.Cell("b", 1, right={f"kv-{i}": "1110" for i in range(6)} | {"kv-9": "0000"})
    found = data.compare(ours, theirs)
    assert found.difference == pytest.approx(0.25)
    assert found.difference_interval == pytest.approx((0.25, 0.25))
    assert found.ratio == pytest.approx(4 / 3)
    assert found.p == pytest.approx(2 * 0.5**6)
    assert data.compare(ours, ours).p == 1
    assert data.Cell("c", 1, right={"kv-0": "1" * 9 + "0"}).interval == pytest.approx((0.5958, 0.9821), abs=1e-4)


@pytest.mark.parametrize("arguments", [(["nothing"], None, None), (None, [12], None), (None, None, ["no-such-*"])])
def test_what_the_plan_lacks_is_refused(arguments):
    with pytest.raises(ConfigurationError, match="allowed"):
        run.chosen_stages(*arguments)


def test_the_page_is_up_to_date():
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    from research.study.__main__ import PAGE, RESULTS
    from research.study.report import write_page

    write_page(PAGE, RESULTS, check=True)
