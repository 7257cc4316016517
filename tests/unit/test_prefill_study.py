"""The study of sparse prefill: rules and attention beside plain loops in float64, its pipeline, its files."""

import json
import math
from dataclasses import replace

import pytest
import torch
from sparse_kernels.page_statistics import KINDS
from sparse_kernels.page_statistics.kinds.quarters import rotate
from support.llama import GROUP, HEAD_SIZE, KV_HEADS, LAYERS, save_llama
from transformers import AutoModelForCausalLM

from bench.common.models import NEEDLE_8M, load_tokenizer
from research.prefill import data, plan, run
from research.prefill.engines import EngineSetting, engine_name, is_right
from research.prefill.pipeline import Prefiller, Tail, attend_tiles, policy_reads
from research.prefill.rules import Coverage, Density, Newest, Queries, Rule, Setting, Tiles, ZipVL, choose
from research.prefill.summaries import BLOCK, BlockMean, Bounds, Box, Keys, MeanAndSpread, Quarters, Representatives
from research.study.documents import Document
from research.study.documents import Tail as Question
from research.study.pipeline import Decoder
from research.study.scores import Mean, Parts
from research.study.settings import Setting as Policy
from vllm_sparse_plugin.errors import ConfigurationError

POISON = 1e4
"""Finite, as stale memory of a cache is, and large enough to show wherever it is read."""


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_tiles(size: int = 64, start: int = 192, lengths: tuple[int, ...] = (128, 65)) -> tuple[Tiles, torch.Tensor]:
    """Two tiles of prompts that end at different places, and keys up to the end of the second."""
    query = drawn(len(lengths), KV_HEADS, GROUP, 2, size, HEAD_SIZE) * 2
    lengths = torch.tensor(lengths)[:, None, None]
    exists = torch.arange(2 * size).view(2, size) < lengths
    keys = drawn(len(lengths), KV_HEADS, start + 2 * size, HEAD_SIZE, seed=1).bfloat16().float()
    there = torch.arange(keys.shape[2]) < start + lengths[:, 0]
    keys = torch.where(there[:, None, :, None], keys, POISON)
    return Tiles(torch.where(exists[:, None, None, ..., None], query, POISON), exists, start), keys


def summarised(rule: Rule, keys: torch.Tensor) -> torch.Tensor:
    return rule.summary.summarise(keys.unflatten(2, (-1, rule.summary.page_size)))


def spoken(queries: Queries, exists: torch.Tensor) -> list[int]:
    """The tokens of a tile that are asked, from the definition."""
    length = int(exists.sum())
    if queries.from_oldest:
        return [i for i in range(length) if i % queries.stride == 0]
    return [i for i in range(length) if (length - 1 - i) % queries.stride == 0]


def slow_scores(rule: Rule, tiles: Tiles, vectors: torch.Tensor, prompt: int, tile: int, head: int):
    """Scores of one tile and KV head, one product at a time: the blocks before the tile, and its own mass."""
    page, first = rule.summary.page_size, tiles.start + tile * tiles.size
    blocks = [-math.inf if rule.form == "score" else 0.0] * (first // BLOCK)
    own = 0.0
    for token in spoken(rule.queries, tiles.exists[prompt, tile]):
        for q in tiles.query[prompt, head, :, tile, token].double():
            if rule.queries.int8:
                step = q.abs().max() / 127
                q = (q / step).round() * step
            limit = first if rule.form == "score" or rule.over == "past" else first + token + 1
            seen = [p for p in range(vectors.shape[2]) if (p + 1) * page <= limit]
            features = rule.summary.features(q.float(), rule.weight).double()
            products = dict(enumerate((vectors[prompt, head].double() @ features).tolist()))
            if rule.form == "score":
                for p in seen:
                    blocks[p * page // BLOCK] = max(blocks[p * page // BLOCK], *products[p])
                continue
            shares = [0.0] * (vectors.shape[2] * page // BLOCK)
            for p in seen:
                for weight in (math.exp(x / math.sqrt(HEAD_SIZE)) for x in products[p]):
                    at = p * page // BLOCK
                    shares[at] = max(shares[at], weight) if rule.form == "best" else shares[at] + weight
            total = sum(shares)
            shares = [share / total for share in shares]
            for b in range(len(blocks)):
                blocks[b] = max(blocks[b], shares[b]) if rule.form == "peak" else blocks[b] + shares[b]
            own += sum(shares[len(blocks) :])
    return blocks, own


RULES = (
    *(Rule(summary, 0.7) for summary in (
        Quarters(), Quarters(vectors=2), Quarters(vectors=4), Quarters("sketch", 2), MeanAndSpread(), Box(),
        Bounds("bf16"), Representatives(), BlockMean(),
    )),
    Rule(Keys(), 0.0, "score", Queries(stride=16)),
    *(Rule(Quarters(), 0.5, "score", Queries(stride=4, from_oldest=oldest)) for oldest in (False, True)),
    Rule(Quarters(), 0.5, "score", Queries(stride=8, int8=True)),
    *(Rule(Quarters(vectors=2), 0.5, "mass", Queries(stride=8), over) for over in ("seen", "past")),
    Rule(Quarters(squared=True), 0.5, "mass", Queries(stride=16)),
    Rule(Quarters(vectors=4), 0.0, "peak", Queries(stride=8)),
    Rule(Quarters(vectors=4), 0.0, "best", Queries(stride=8)),
    Rule(Keys(), 0.0, "mass", Queries(stride=16)),
)  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.label)
@pytest.mark.parametrize("size", [64, 128])
def test_rules_score_blocks_by_their_formulas(rule, size):
    tiles, keys = some_tiles(size)
    vectors = summarised(rule, keys)
    scores, own = rule.score(tiles, vectors, torch.Generator())
    for prompt in range(2):
        for tile in range(prompt, 2):
            blocks, mine = slow_scores(rule, tiles, vectors, prompt, tile, 1)
            found = scores[prompt, tile, 1].double()
            wanted = torch.tensor(blocks, dtype=torch.float64)
            torch.testing.assert_close(found[: len(blocks)], wanted, rtol=1e-4, atol=1e-4)
            assert (found[len(blocks) :] == -torch.inf).all(), "blocks that are not before the tile"
            if rule.form in ("mass", "best"):
                assert float(own[prompt, tile, 1]) == pytest.approx(mine, rel=1e-4, abs=1e-4)


def test_the_mean_query_and_random_queries_speak_only_of_what_exists():
    tiles, keys = some_tiles()
    asked, exists, position = Queries("mean").of(tiles, torch.Generator())
    torch.testing.assert_close(asked[1, :, :, 1, 0], tiles.query[1, :, :, 1, 0])
    torch.testing.assert_close(asked[0, :, :, 0, 0], tiles.query[0, :, :, 0].mean(dim=2))
    assert exists.all()
    assert position.tolist() == [[[191], [255]]] * 2
    asked, exists, position = Queries("random", count=8).of(tiles, torch.Generator().manual_seed(0))
    assert exists.sum(dim=2).tolist() == [[8, 8], [8, 1]]
    assert len(set(position[0, 0].tolist())) == 8
    at = position[0, 1] - 256
    assert torch.equal(asked[0, :, :, 1], tiles.query[0, :, :, 1, at])
    rule = Rule(Keys(), 0.0, "mass", Queries("random"))
    scores, own = rule.score(tiles, summarised(rule, keys), torch.Generator().manual_seed(0))
    total = own + scores.clamp(min=0).sum(dim=-1)
    assert torch.allclose(total, exists.sum(dim=2)[..., None] * float(GROUP)), "shares of a query add up to 1"


def test_summaries_are_what_the_cache_gives_back():
    keys = drawn(3, 8, HEAD_SIZE, seed=3).bfloat16().float()
    for name in ("quarters", "sketch"):
        kind = KINDS[name]
        quarters = keys.unflatten(1, (4, 2)).mean(dim=2)
        codes, steps = kind.codes.pack(rotate(quarters) if name == "sketch" else quarters)
        four = kind.codes.unpack(codes) * kind.codes.per_vector(steps.float()).unsqueeze(-1)
        found = Quarters(name, 4).summarise(keys)
        torch.testing.assert_close(found[..., :-1], four)
        query = drawn(HEAD_SIZE, seed=4)
        torch.testing.assert_close(
            found @ Quarters(name, 4).features(query, 1.0), kind.features(query, 0.0)[0] @ four.mT
        )
        one = Quarters(name, 1).summarise(keys)[:, 0]
        torch.testing.assert_close(one[:, :-1], four.mean(dim=1))
        torch.testing.assert_close(one[:, -1], (four - four.mean(dim=1, keepdim=True)).square().mean(1).sum(1).sqrt())
    most, least = keys.amax(dim=1), keys.amin(dim=1)
    box = Box("bf16").summarise(keys)[:, 0]
    torch.testing.assert_close(box[:, -1], (most - least).norm(dim=-1) / 2)
    exact = UNIQUE_BF16.summarise(keys)[:, 0]
    torch.testing.assert_close(exact[:, :-1], keys.mean(dim=1).bfloat16().float())
    query = drawn(HEAD_SIZE)
    bound = torch.maximum(query * most, query * least).sum(dim=-1)
    found = Bounds("bf16").summarise(keys)[:, 0] @ Bounds("bf16").features(query, 0.0)
    torch.testing.assert_close(found, bound)


UNIQUE_BF16 = MeanAndSpread("bf16")


def test_a_density_reads_the_best_blocks_with_the_first_and_the_previous_one():
    past = torch.tensor([1, 2, 10, 41])
    scores = drawn(1, 4, 2, 41, seed=5)
    chosen = choose(scores, torch.zeros(1, 4, 2), past, Density(0.2, 3))
    for tile, (number, count) in enumerate(zip(past.tolist(), (1, 2, 3, 9), strict=True)):
        for head in range(2):
            others = sorted(range(1, number - 1), key=lambda b: -scores[0, tile, head, b])
            wanted = {0, number - 1, *others[: max(count - 2, 0)]}
            assert set(chosen[0, tile, head].nonzero().flatten().tolist()) == wanted
    equal = choose(torch.zeros(1, 1, 1, 9), torch.zeros(1, 1, 1), torch.tensor([9]), Density(0.5))
    assert equal.flatten().nonzero().flatten().tolist() == [0, 1, 2, 3, 8], "ties go to the lowest block"
    sevens = Density(0.07, 0).keep(torch.zeros(1, 1, 1, 99), torch.zeros(1), torch.tensor([100]))
    assert sevens.sum() == 7, "100 * 0.07 is more than 7 in floating point"


def test_a_coverage_reads_the_fewest_blocks_that_reach_it():
    mass = torch.tensor([[[[0.1, 1.0, 0.5, 3.0, 0.2, 0.2]]]])
    own = torch.tensor([[[1.0]]])

    def read(share: float, floor: int = 0) -> list[int]:
        return choose(mass, own, torch.tensor([6]), Coverage(share, floor)).flatten().nonzero().flatten().tolist()

    assert read(0.2) == [0, 5], "1.3 of 6 with the own tile, the first and the previous block"
    assert read(0.1) == [0, 5], "also where the own tile alone holds enough"
    assert read(0.71) == [0, 3, 5]
    assert read(0.73) == [0, 1, 3, 5]
    assert read(0.2, floor=3) == [0, 3, 5]
    assert read(1.0) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("size", [64, 128])
def test_tiles_attend_their_blocks_and_themselves_up_to_each_token(size):
    tiles, keys = some_tiles(size)
    values = torch.where(keys == POISON, POISON, drawn(*keys.shape, seed=2))
    number = tiles.start // BLOCK + size // BLOCK
    chosen = torch.rand(2, 2, KV_HEADS, number, generator=torch.Generator().manual_seed(4)) < 0.5
    chosen &= torch.arange(number) < tiles.past_blocks[:, None, None]
    output = attend_tiles(tiles, keys, values, chosen)
    for prompt, head, tile in ((0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1)):
        first = tiles.start + tile * size
        for token in tiles.exists[prompt, tile].nonzero().flatten().tolist()[::13]:
            read = [
                b * BLOCK + i for b in chosen[prompt, tile, head].nonzero().flatten().tolist() for i in range(BLOCK)
            ]
            read += range(first, first + token + 1)
            k, v = (x[prompt, head, read].double() for x in (keys, values))
            for g in range(GROUP):
                q = tiles.query[prompt, head, g, tile, token].double()
                wanted = (k @ q / math.sqrt(HEAD_SIZE)).softmax(dim=0) @ v
                torch.testing.assert_close(output[prompt, head, g, tile, token].double(), wanted, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("model"), longest=1024)


@pytest.fixture(scope="module")
def prefiller(folder):
    return Prefiller(folder)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


DOCUMENT = 384
TAILS = (Tail(tokens(80, 1), 66), Tail(tokens(141, 2), 130), Tail(tokens(12, 3), 3))
DENSE = Policy()


def likely_by(model, prompt: list[int], tail: list[int]) -> torch.Tensor:
    """Log-probabilities of the tokens of a tail but the first, by transformers."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tail]])).logits[0, len(prompt) :]
    return logits[:-1].log_softmax(dim=-1).gather(1, torch.tensor(tail[1:])[:, None]).squeeze(1)


def likely_in(decoded, tails) -> torch.Tensor:
    """The same by the pipeline, of all tails."""
    return torch.cat([row[: len(t.tokens) - 1] for row, t in zip(decoded.log_probability, tails, strict=True)])


def test_dense_is_the_models_own(folder, prefiller):
    document = tokens(DOCUMENT, 0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    wanted = torch.cat([likely_by(model, document, list(tail.tokens)) for tail in TAILS])
    prefilled = prefiller.prefill(document, Setting())
    found = likely_in(prefiller.decode(prefilled, TAILS, Setting(), DENSE), TAILS)
    # Keys and values are rounded to bfloat16 here, and not there; a wrong position changes it all.
    assert (found - wanted).abs().mean() < 0.03 * wanted.std()
    assert prefilled.loss == pytest.approx(-likely_by(model, document[:1], document[1:])[191:].mean().item(), rel=5e-3)


@pytest.mark.parametrize("setting", [Setting(plan.SCORE, Density(1.0)), Setting(plan.MASS_ALL, Coverage(1.0), 128)])
def test_a_prefill_of_all_blocks_and_a_policy_of_all_pages_are_dense(prefiller, setting):
    document = tokens(DOCUMENT, 0)
    dense = likely_in(prefiller.decode(prefiller.prefill(document, Setting()), TAILS, Setting(), DENSE), TAILS)
    prefilled = prefiller.prefill(document, setting)
    assert prefilled.density == [1.0] * LAYERS
    for policy in (DENSE, Policy(Parts(4, 4), 8, 1024)):
        found = likely_in(prefiller.decode(prefilled, TAILS, setting, policy), TAILS)
        # A key or value that lies between two bfloat16 may be stored as either.
        torch.testing.assert_close(found, dense, rtol=0, atol=2e-2)
        assert (found - dense).abs().median() < 1e-4


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("rule", [plan.SCORE, plan.MASS_ALL, Newest()], ids=lambda rule: rule.label)
def test_a_document_with_tails_is_what_each_prompt_gives_by_itself(prefiller, rule, tile):
    setting = Setting(rule, Density(0.3, 2), tile)
    whole = prefiller.prefill(tokens(DOCUMENT, 0), setting)
    together = prefiller.decode(whole, TAILS, setting, DENSE)
    begun = prefiller.prefill(tokens(DOCUMENT, 0)[:256], setting)
    for i, tail in enumerate(TAILS):
        rest = tokens(DOCUMENT, 0)[256:]
        alone = prefiller.decode(begun, [Tail([*rest, *tail.tokens], 128 + tail.prompt_tokens)], setting, DENSE)
        count = len(tail.tokens) - 1
        found, wanted = together.log_probability[i, :count], alone.log_probability[0, 128 : 128 + count]
        # A key or value that lies between two bfloat16 may be stored as either.
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-2)
        assert (found - wanted).abs().median() < 1e-3
    assert max(whole.density) < 0.7


@pytest.mark.parametrize("policy", [Policy(Mean("int8", 0.75), 8, 48), plan.SPARSE_DECODE], ids=lambda p: p.name)
def test_decode_steps_read_what_the_study_of_page_scores_reads(folder, prefiller, policy):
    document = tokens(DOCUMENT, 0)
    prefilled = prefiller.prefill(document, Setting())
    tail = tokens(21, 9)
    ours = prefiller.decode(prefilled, [Tail(tail, 0)], Setting(), policy)
    decoder = Decoder(folder)
    theirs = decoder.decode(decoder.prefill(document), [tail], policy)
    torch.testing.assert_close(ours.log_probability, theirs.log_probability, rtol=0, atol=1e-2)
    assert (ours.log_probability - theirs.log_probability).abs().median() < 1e-4


def test_a_decode_step_sees_no_later_token():
    query, keys = drawn(1, KV_HEADS, GROUP, 3, HEAD_SIZE), drawn(1, KV_HEADS, 205, HEAD_SIZE)
    position = torch.tensor([[199, 200, 203]])
    read = policy_reads(query, keys, position, Policy(Mean("int8", 1.0), 8, 48))
    for i, last in enumerate(position[0].tolist()):
        assert not read[0, :, i, last + 1 :].any()
        assert read[0, :, i, (last + 1) // 8 * 8 : last + 1].all(), "the incomplete page"
        assert (read[0, :, i, : (last + 1) // 8 * 8].sum(dim=-1) == 48).all()


@pytest.mark.parametrize("tau", [0.4, 0.9])
def test_zipvl_keeps_what_its_definition_says(tau):
    setting = ZipVL(tau, newest_probes=4, random_probes=3)
    query, keys = drawn(KV_HEADS, GROUP, 7, HEAD_SIZE) * 2, drawn(KV_HEADS, 50, HEAD_SIZE, seed=1)
    probes = setting.probes(50, torch.Generator().manual_seed(0))
    assert probes[-4:].tolist() == [46, 47, 48, 49]
    assert len(set(probes.tolist())) == 7
    total, seen = [0.0] * 50, [0] * 50
    for row, position in enumerate(probes.tolist()):
        for j in range(position + 1):
            seen[j] += 1
        for head in range(KV_HEADS):
            for g in range(GROUP):
                logits = keys[head, : position + 1].double() @ query[head, g, row].double() / math.sqrt(HEAD_SIZE)
                for j, share in enumerate(logits.softmax(dim=0).tolist()):
                    total[j] += share
    reached, count = 0.0, 0
    for each in sorted(total, reverse=True):
        reached, count = reached + each, count + 1
        if reached >= tau * sum(total):
            break
    ranked = sorted(range(49), key=lambda j: -total[j] / max(seen[j], 1))
    assert setting.keep(query, keys, probes).tolist() == sorted([*ranked[: count - 1], 49])
    assert len(replace(setting, share=0.3).keep(query, keys, probes)) == 15


def test_zipvl_with_every_token_is_dense(folder, prefiller):
    prompt, tail = tokens(90, 0), Tail(tokens(30, 1), 18)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    likely = likely_by(model, prompt, list(tail.tokens))
    for drop in (False, True):
        decoded = prefiller.zipvl(prompt, tail, ZipVL(share=1.0, newest_probes=8, random_probes=8), drop)
        assert (decoded.log_probability[0] - likely).abs().mean() < 0.03 * likely.std()
        assert decoded.share == [1.0] * LAYERS
    half = ZipVL(share=0.5, newest_probes=8, random_probes=8)
    kept, everything = (prefiller.zipvl(prompt, tail, half, drop) for drop in (True, False))
    assert torch.equal(kept.log_probability[:, :17], everything.log_probability[:, :17]), "the prompt is the same"
    assert not torch.equal(kept.log_probability[:, 17:], everything.log_probability[:, 17:])


def test_names_of_settings_are_unique():
    settings = {setting for stage in plan.STAGES for setting in stage.settings}
    assert len({setting.name for setting in settings}) == len(settings) > 100
    assert all(len({setting.name for setting in stage.settings}) == len(stage.settings) for stage in plan.STAGES)


def short_document(name: str) -> Document:
    """A document of 384 tokens with a needle, and questions that needle-8m answers."""
    tokenizer = load_tokenizer(NEEDLE_8M)
    needles = '\n"de826abf": "baacdf93",\n' + "x = 1\n" * 20 + '\n"0a1b2c3d": "f00d5678",\n'
    tokens = tokenizer.encode("x = 1\n" * 30 + needles + "y = 2\n" * 200)[:384]
    tails = []
    for key, value in (("de826abf", "baacdf93"), ("0a1b2c3d", "f00d5678")):
        question = tokenizer.encode(f'\nKey "{key}" has the value:', add_special_tokens=False)
        answer = tokenizer.encode(f" {value}", add_special_tokens=False)
        tails.append(Question([*question, *answer], len(answer), value))
    return Document(name, tokens, tails)


@pytest.fixture(scope="module")
def needle_8m():
    return Prefiller(NEEDLE_8M)


@pytest.mark.parametrize("tile", [64, 128])
def test_answers_are_read_after_what_is_left_of_the_document(needle_8m, tile):
    whole = short_document("kv-4096-0-0")
    document = replace(whole, tokens=whole.tokens[:347])
    row = run.answer(needle_8m, document, Setting(plan.SCORE_ALL, Density(0.8), tile), 0)
    assert row["right"] == row["right_sparse"] == "11"
    assert row["answer_loss"] < 0.05
    wrong = replace(document, tails=[replace(tail, tokens=[*tail.tokens[:-1], 5]) for tail in document.tails])
    assert run.answer(needle_8m, wrong, Setting(), 0)["right"] == "00"
    text = run.read_text(needle_8m, whole, Setting(), 0)
    assert 0 < text["text_loss"] < 1, "the text repeats itself"


def test_a_run_goes_on_where_time_ended_it_and_collects(tmp_path, monkeypatch, needle_8m):
    def source(build):
        task, context, count = build
        return [short_document(f"{task}-{context}-0-{i}") for i in range(count)]

    monkeypatch.setattr(run, "document_source", lambda seed, folder: source)
    monkeypatch.setattr(run, "Prefiller", lambda folder, device: needle_8m)
    output = tmp_path / "raw.jsonl"
    settings = (Setting(), Setting(plan.SCORE, Density(0.1)))
    common = {"contexts": (4096,), "documents": 1, "tasks": ("kv",)}
    stages = [
        plan.Stage("a", settings=settings, questions=1, **common),
        plan.Stage("t", settings=settings[:1], kind="text", **common),
        plan.Stage("z", settings=(ZipVL(share=0.9),), questions=1, kind="zipvl", **common),
    ]

    def go_on(time_limit: float = 1e6) -> bool:
        return run.measure(output, run.Selection(stages, 0, time_limit), "cpu", tmp_path, None)

    assert not go_on(0)
    assert go_on()
    lines = output.read_text()
    with output.open("a") as file:
        file.write('{"document": "kv-4096-0-0", "sett')
    assert go_on()
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    rows = [row for row in rows if "setting" in row]
    assert [row["setting"] for row in rows] == ["dense", settings[1].name, "dense", "zipvl/p0.9/64+64"]
    assert output.read_text().startswith(lines)
    assert len(rows[0]["right"]) == len(rows[3]["right_sparse"]) == 1
    assert rows[1]["density"][0] == pytest.approx((1 + 2 + 3 + 4 + 4) / 15, abs=1e-4), "a floor of 4 blocks"

    collected, again = tmp_path / "all.jsonl", tmp_path / "again.jsonl"
    data.collect_runs([output], collected)
    results = data.Results(collected)
    dense = results.cells[data.Key(4096, False, "dense")]
    assert dense.right == {"kv-0": rows[0]["right"]}
    assert dense.text_loss.keys() == dense.prefill_loss.keys() == {"kv-0"}
    assert dense.mean_density == 1.0
    assert len(results.cells) == 3
    data.collect_runs([collected], again)
    assert data.Results(again).cells == results.cells
    assert settings[1].name in data.summary_table(again)


def test_every_part_of_the_page_shows_what_was_measured(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    from bench.common.results import RESULTS
    from research.prefill import report

    hardware = {"processor": "none", "cores": 1}
    about = {"date": "2026-01-01", "command": "python -m none", "versions": {"torch": "2"}, "hardware": hardware}
    rows = [about]
    for stage in plan.STAGES:
        for setting in stage.settings:
            for task, context in ((t, c) for t in stage.tasks for c in stage.contexts):
                for index in range(stage.documents):
                    prefix = "text-" * (stage.kind == "text")
                    row = {"document": f"{prefix}{task}-{context}-0-{index}", "setting": setting.name}
                    loss = len(setting.name) / 100 + index
                    if prefix:
                        rows.append(row | {"text_loss": loss, "density": [0.1, 0.2]})
                        continue
                    answers = {"right": "1" * stage.questions, "right_sparse": "10" * (stage.questions // 2)}
                    losses = {"answer_loss": loss, "prefill_loss": loss}
                    rows.append(row | answers | losses | {"density": [0.1, 0.3], "seconds": 1.0})
    engine = {"document": "kv-16384-0-0", "setting": engine_name("gpu", "shipped"), "right": "11111110"}
    raw = tmp_path / "raw.jsonl"
    raw.write_text("".join(json.dumps(row) + "\n" for row in [*rows, engine]))
    results = data.Results(raw)
    results.path = RESULTS / report.SOURCE
    page, empty = report.Page(results), report.Page(None)
    for name, part in report.PARTS.items():
        assert report.NOT_YET not in part(page), name
        assert report.NOT_YET in part(empty), name
    assert "cut by its time limit" not in page.finalists()
    dense = f"| `dense` | 0.200 | +0.0000 ± 0.0000 | +0.0000 ± 0.0000 | {7 * 4 * 8}"
    assert "1.000 (0.98-1.00)" in page.finalists()
    assert dense.rpartition("|")[0] in page.finalists()
    assert f"{dense.rpartition('|')[0]}| 64/64 |" in page.bounds(), "the documents of the wide stage only"
    assert page.engines().endswith("| GPU | shipped | dense | 8 | 7 | 8 | 1 |")
    page.draw(tmp_path)
    assert {path.name for path in tmp_path.glob("*.svg")} == {"density.svg", "strides.svg"}


def test_a_stage_that_was_cut_is_compared_on_what_all_its_settings_have_read():
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    from research.prefill import report

    read = {setting.name: 5 for setting in plan.finalists()}
    read["dense"] = 6
    cells = {}
    for alike, task in ((False, "kv"), (True, "denseneedle")):
        for name, count in read.items():
            cell = data.Measured(name, plan.MAIN_CONTEXT, alike)
            for index in range(count):
                row = {"right": "11111111" if index < 5 else "00000000", "right_sparse": "1" * 8, "answer_loss": index}
                cell.add(f"{task}-{index}", row | {"prefill_loss": index, "density": [0.1]})
            cells[data.Key(plan.MAIN_CONTEXT, alike, name)] = cell
    page = report.Page(None)
    page.cells = cells
    found = page.lines(report._FINALISTS, plan.finalists())
    assert "| `dense` | 0.100 | +0.0000 ± 0.0000 | +0.0000 ± 0.0000 | 40/40 | 40/40 | 40/40 |" in found
    assert "On 5 documents, and 5 of look-alikes. The stage was cut by its time limit: 35 were planned." in found
    assert "10 of 35" in page.provenance()
    lacking = Setting(plan.SCORE, Density(0.1), 128)
    cells[data.Key(plan.MAIN_CONTEXT, False, lacking.name)] = data.Measured(lacking.name, plan.MAIN_CONTEXT)
    assert page.cell(report._FINALISTS, lacking) is None, "a setting of another stage that lacks a document"


def test_losses_are_compared_on_the_documents_of_both():
    difference, error = data.paired({"a": 1.0, "b": 3.0, "c": 9.0}, {"a": 0.5, "b": 2.0})
    assert difference == pytest.approx(0.75)
    assert error == pytest.approx(1.96 * math.sqrt(0.125 / 2))
    assert math.isnan(data.paired({"a": 1.0}, {"a": 0.5})[1]), "one document says nothing of others"


@pytest.mark.parametrize("arguments", [(["nothing"], None, None), (None, [12], None), (None, None, ["no-such-*"])])
def test_what_the_plan_lacks_is_refused(arguments):
    with pytest.raises(ConfigurationError, match="allowed"):
        run.chosen_stages(*arguments, None)


def test_a_pattern_takes_settings_of_the_whole_plan():
    (stage,) = run.chosen_stages(["finalists"], None, ["newest/*", "dense"], 2)
    assert {setting.name for setting in stage.settings} >= {"dense", "newest/t64/d0.025f4", "newest/t64/d0.2f4"}
    assert stage.documents == 2


def test_the_page_is_up_to_date():
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    from research.prefill.__main__ import PAGE, RESULTS
    from research.prefill.report import write_page

    write_page(PAGE, RESULTS, check=True)


def test_engines_are_asked_as_torch_is():
    assert EngineSetting("dense", "dense").variant.backend is None
    assert EngineSetting("studied", "dense").variant.backend == "DENSE"
    assert EngineSetting("dense", "sparse").additional_config is None
    settings = EngineSetting("studied", "sparse")
    assert settings.variant.backend == "UNIQUE"
    assert json.loads(settings.additional_config)["sparse_attention"]["prefill"]["min_context_tokens"] == 0
    tokenizer = load_tokenizer(NEEDLE_8M)
    answer = tokenizer.encode(" 1234", add_special_tokens=False)
    question = Question([*tokenizer.encode("Which?"), *answer], len(answer), "1234")
    after = tokenizer.encode("\n", add_special_tokens=False)[0]
    assert is_right(question, [*answer, after], tokenizer)
    assert not is_right(question, [*answer[:-1], after, after], tokenizer)
