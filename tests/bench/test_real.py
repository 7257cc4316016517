"""The study of rules on a pretrained model, on a tiny Llama with random weights and on drawn votes."""

import json
from dataclasses import replace

import pytest
import torch
from sparse_kernels.page_statistics import KINDS
from sparse_kernels.page_statistics.codes import Codes
from support.llama import GROUP, KV_HEADS, LAYERS, save_llama
from transformers import LlamaForCausalLM

from research.real import adaptive, contributions, decode, pages, prefill, reuse, routing, rules, sinks
from research.real.__main__ import PAGE_ARMS, choose_arms
from research.real.answers import PackedCache, answer, keep, measure_answers
from research.real.model import Cache, Llama, causal_attention, causal_weights, masked_attention, read, window_attention
from research.real.report import tables
from research.real.rules import RULES, SINKS, Rule, budget_of, choose, combine, layer_budgets, pool, survival
from research.real.texts import RULER, Prompt, find_spans, read_prompts, write_prompts
from research.real.votes import read_again, read_prompt, watch_answer
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.eval.statistics import estimate_ratio

TOKENS, ROOM = 300, 6


def _tokens(seed: int, count: int = TOKENS) -> list[int]:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"), 2048)


@pytest.fixture(scope="module")
def model(folder) -> Llama:
    return Llama.load(folder, "cpu", torch.float32)


@pytest.fixture(scope="module")
def question() -> Prompt:
    return Prompt(RULER, "q/0", 320, _tokens(0), "niah_single_1", ("ab",), ROOM, ((50, 57),), 5, (3, 4, 5))


@pytest.fixture(scope="module")
def text() -> Prompt:
    return Prompt("prose", "prose/0", TOKENS, _tokens(1))


def test_forward_pass_is_that_of_transformers(folder, model):
    tokens = torch.tensor(_tokens(2, 64))
    expected = LlamaForCausalLM.from_pretrained(folder)(tokens[None]).logits[0]
    cache = Cache(model, 64)
    # In two pieces, so that the second one attends to a cache.
    hidden = torch.cat([read(model, tokens[:40], cache), read(model, tokens[40:], cache)])
    torch.testing.assert_close(model.logits(hidden), expected, rtol=1e-4, atol=1e-4)


def test_negative_positions_take_positions_away(model):
    rows, positions = torch.randn(1, 2, 7, model.head_size), torch.arange(5, 12)
    turned = model.rotate(rows, positions)
    torch.testing.assert_close(model.rotate(turned, -positions), rows)
    assert not torch.allclose(turned, rows)


def test_weights_are_those_of_the_attention():
    query, keys, values = torch.randn(6, 9, 16), torch.randn(3, 20, 16), torch.randn(3, 20, 16)
    weights = causal_weights(query, keys, 0.25, torch.arange(11, 20))
    expected = causal_attention(query[None], keys[None], values[None], 0.25)[0]
    torch.testing.assert_close((weights @ values[:, None]).flatten(0, 1), expected)


def test_another_architecture_is_refused():
    with pytest.raises(ConfigurationError, match="got 'gpt2', allowed: a Llama"):
        Llama({"model_type": "gpt2"}, {}, "cpu")


@pytest.mark.parametrize("arm", RULES)
def test_each_rule_keeps_its_budget(arm):
    rule, tokens = RULES[arm], 2000
    votes = torch.rand(30, 3, 1, tokens, generator=torch.Generator().manual_seed(0))
    budget = budget_of(tokens, 0.25)
    kept = choose(combine(votes, torch.ones(30, 3, tokens, 1), rule, 7), rule, budget, 7)
    # Whole blocks of a layer cost at most a block each; a pyramid's last layers keep the window besides.
    assert budget - rules.BLOCK < kept.float().mean() * tokens <= budget + (rule.window // 10 if rule.pyramid else 0)
    if rule.source != "newest":
        assert kept[..., :SINKS].all()
    assert kept[..., -rule.window :].all()
    if not rule.adaptive:
        assert (kept.sum(dim=-1) == kept.sum(dim=-1)[:, :1]).all()


def test_a_rule_that_the_server_follows_needs_a_setting():
    assert {RULES[arm].serves for arm in ("snapkv", "pool25", "window64", "h2o", "pyramid", "newest")} == {"setting"}
    assert {RULES[arm].serves for arm in ("avg7", "model25", "ahead25", "repeat", "expected", "gmax")} == {"code"}
    assert RULES["ada"].serves.startswith("no:")


def test_tokens_take_votes_of_their_neighbours():
    votes = torch.zeros(1, 1, 20)
    votes[..., 10] = 1.0
    where = {
        name: pool(votes, rule)[0, 0].nonzero()[:, 0].tolist()
        for name, rule in {
            "around": Rule(pool=5), "average": Rule(pool=5, average=True), "ahead": Rule(ahead=4),
            "page": Rule(pool=1, page=8), "alone": Rule(pool=1),
        }.items()
    }  # fmt: skip
    assert where["around"] == where["average"] == [8, 9, 10, 11, 12]
    assert where["ahead"] == [8, 9, 10, 11, 12, 13]
    assert where["page"] == [8, 9, 10, 11, 12, 13, 14, 15]
    assert where["alone"] == [10]


def test_heads_vote_together():
    votes = torch.zeros(2, 3, 2, 200)
    votes[1, 2, 1, 50] = 1.0
    values = torch.ones(2, 3, 200, 4)
    shares = {
        across: (combine(votes, values, Rule(across=across))[..., 50] > 0).float().mean().item()
        for across in ("none", "layer", "model")
    }
    assert shares == pytest.approx({"none": 1 / 6, "layer": 1 / 2, "model": 1.0})
    # Tokens of the window are kept anyway, and lend no neighbour their votes.
    votes[:] = 0
    votes[..., -32] = 1
    assert not combine(votes, values, Rule()).any()


def test_budgets_of_layers():
    assert layer_budgets(Rule(whole_layers=2), 256, 1024, 10)[:2] == [1024, 1024]
    assert sum(layer_budgets(Rule(whole_layers=2), 256, 1024, 10)) <= 2560
    pyramid = layer_budgets(Rule(pyramid=20.0), 512, 4096, 10)
    assert pyramid == sorted(pyramid, reverse=True)
    assert pyramid[-1] < 512 < pyramid[0]


def test_adaptive_budgets_follow_the_votes():
    votes = torch.zeros(1, 2, 1, 400)
    votes[:, 0] = 1.0
    kept = choose(combine(votes, torch.ones(1, 2, 400, 1), Rule(adaptive=True)), Rule(adaptive=True), 100)
    assert kept.sum(dim=-1).tolist() == [[164, 36]]


def test_survival_counts_heads_that_keep_an_answer_whole():
    kept = torch.ones(2, 2, 100, dtype=torch.bool)
    kept[0, 0, 12] = False
    assert survival(kept, ((10, 15), (20, 25))) == pytest.approx((0.75 + 1) / 2)


def test_answers_of_a_whole_prompt_are_those_of_the_model(folder, model, question):
    other = replace(question, tokens=_tokens(3, 40))
    reads = [read_prompt(model, each, set()) for each in (question, other)]
    everything = [torch.ones(LAYERS, KV_HEADS, each.num_tokens, dtype=torch.bool) for each in reads]
    said = answer(model, reads, [None, None], [ROOM, ROOM], [])
    assert answer(model, reads, everything, [ROOM, ROOM], []) == said
    expected = LlamaForCausalLM.from_pretrained(folder).generate(
        torch.tensor([other.tokens]), max_new_tokens=ROOM, do_sample=False, eos_token_id=None
    )
    assert said[1] == expected[0, 40:].tolist()


def test_a_prompt_does_not_attend_to_what_pads_it(model, question):
    long, short = (read_prompt(model, replace(question, tokens=_tokens(4, size)), set()) for size in (TOKENS, 40))
    query, key, value = (torch.randn(1, heads, 1, model.head_size) for heads in (KV_HEADS * GROUP, KV_HEADS, KV_HEADS))
    alone, beside = (
        PackedCache(model, reads, [None] * len(reads), ROOM).attend(
            0, 0, *(part.expand(len(reads), -1, -1, -1) for part in (query, key, value)), model.scale
        )
        for reads in ([short], [short, long])
    )
    torch.testing.assert_close(beside[:1], alone)


def test_answers_see_only_what_is_kept(model, question):
    one = read_prompt(model, question, set())
    kept = keep(one, RULES["snapkv"], 0.25, model.scale)
    changed = read_prompt(model, question, set())
    hidden = ~kept[..., None].expand_as(changed.keys)
    changed.cache.keys[:, :, :TOKENS][hidden] += 3
    changed.cache.values[:, :, :TOKENS][hidden] -= 3
    assert answer(model, [changed], [kept], [ROOM], []) == answer(model, [one], [kept], [ROOM], [])
    assert answer(model, [changed], [None], [ROOM], []) != answer(model, [one], [None], [ROOM], [])


def test_every_source_votes(model, question):
    one = read_prompt(model, question, {"h2o", "expected"})
    read_again(model, one, [7, 8], chunk=128)
    watch_answer(model, one, [])
    assert not one.votes["answer"].any()
    watch_answer(model, one, [1, 2, 3])
    assert set(one.votes) == {"h2o", "expected", "repeat", "answer"}
    for votes in one.votes.values():
        assert votes.shape == (LAYERS, KV_HEADS, GROUP, TOKENS)
        assert bool((votes >= 0).all())
    # Each of the prompt's queries has one vote to give.
    torch.testing.assert_close(one.votes["h2o"].sum(dim=-1), torch.full((LAYERS, KV_HEADS, GROUP), float(TOKENS)))
    # The largest of several distributions add up to more than one of them.
    assert bool((one.votes["repeat"].sum(dim=-1) > 1).all())
    window = one.votes_for(Rule(window=TOKENS), model.scale)
    assert window.sum().item() == pytest.approx(LAYERS * KV_HEADS * GROUP * 192, rel=1e-4)


def test_important_tokens_are_the_fewest_that_reach_tau():
    sums = torch.tensor([5.0, 1.0, 3.0, 1.0, 0.0])
    seen_by = torch.ones(5)
    assert prefill.important_tokens(sums, seen_by, prefill.Form(tau=0.8)).tolist() == [True, False, True, False, True]
    assert prefill.important_tokens(sums, seen_by, prefill.Form(tau=0.5)).tolist() == [True, False, False, False, True]
    # A late token that few rows see is as important as they find it.
    seen_by = torch.tensor([50.0, 50.0, 50.0, 1.0, 1.0])
    late = [False, False, False, True, True]
    assert prefill.important_tokens(sums, seen_by, prefill.Form(tau=0.5)).tolist() == late


def test_a_fixed_share_ignores_the_attention_and_votes_may_be_ranked_by_sums():
    sums, seen_by = torch.tensor([5.0, 4.0, 3.0, 1.0, 0.5]), torch.tensor([5.0, 5.0, 5.0, 1.0, 1.0])
    form = prefill.Form(ratio=0.3, tau=1.0)
    # Two of five tokens, rounded up, and the last one.
    assert prefill.important_tokens(sums, seen_by, form).tolist() == [True, False, False, True, True]
    by_sums = replace(form, ranked="sums")
    assert prefill.important_tokens(sums, seen_by, by_sums).tolist() == [True, True, False, False, True]
    # By sums 0.6 of 13.5 takes two tokens, by means 0.6 of 3.9 takes three.
    counts = [
        int(prefill.important_tokens(sums, seen_by, prefill.Form(tau=0.6, counted=by, ranked="sums"))[:4].sum())
        for by in ("sums", "means")
    ]
    assert counts == [2, 3]


def test_fixed_shares_have_the_mean_of_adaptive_ones(model, text, question):
    reader = adaptive.Reader(model, lambda ids: " ".join(map(str, ids)), [], ROOM)
    rows = list(adaptive.measure_adaptive(reader, model, [text], [question], ["zero_0.975", "attend_0.99"]))
    dense, noise = rows[:2], rows[2:4]
    assert [row["arm"] for row in (*dense, *noise)] == [adaptive.DENSE] * 2 + [prefill.NOISE] * 2
    assert ["score" in row for row in dense] == [False, True]
    # The same model decodes the same tokens, those of the answer included.
    assert [row["agreement"] for row in noise] == [1.0, 1.0]
    found = [row for row in rows[4:] if "text" in row]
    choices = [adaptive.ADAPTIVE, adaptive.FIXED, adaptive.FIXED_BY_TEXT, *adaptive.VOTES, adaptive.COUNTED]
    assert [(row["arm"], row["choice"]) for row in found[::2]] == [
        *(("zero_0.975", choice) for choice in choices), *(("attend_0.99", choice) for choice in choices[:2]),
    ]  # fmt: skip
    free, fixed, by_text = (found[first : first + 2] for first in (0, 2, 4))
    assert len({share for row in free for share in row["kept_by_layer"]}) > 1
    # A token is 1 / 172 of the text; up to two join.
    mean = sum(row["kept"] for row in free) / 2
    for row, own in zip((*fixed, *by_text), (mean, mean, *(row["kept"] for row in free)), strict=True):
        assert row["ratio"] == pytest.approx(own, abs=1e-4)
        assert all(0 <= share - own <= 3 / 172 for share in row["kept_by_layer"])
    (table, by_layer) = tables(rows)
    assert (table.row_count, by_layer.row_count) == (9, 4)


def test_an_answer_after_a_dense_prefill_is_the_dense_answer(model, question, monkeypatch):
    monkeypatch.setitem(adaptive.ARMS, "all", prefill.Form("rows", tau=1.1))
    reader = adaptive.Reader(model, lambda ids: " ".join(map(str, ids)), [], ROOM)
    dense, whole, *_ = (
        row for row in adaptive.measure_adaptive(reader, None, [], [question], ["all"]) if "text" in row
    )
    assert dense["said"] == whole["said"]
    assert (whole["agreement"], whole["kept"]) == (1.0, 1.0)


def test_forms_say_what_attends():
    important = torch.tensor([True, False, True, False])
    zero, rows = (prefill.allowed_pairs(important, form) for form in (prefill.Form(), prefill.Form("rows")))
    assert zero.int().tolist() == [[1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
    assert rows.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    dense = prefill.allowed_pairs(important, prefill.Form(shortest=4))
    assert dense.equal(torch.ones(4, 4, dtype=torch.bool).tril())


def test_prefill_of_all_tokens_is_dense(model, text):
    rows = list(prefill.measure_prefill(model, model, [text], ["zipvl", "rows_999"]))
    assert [row["arm"] for row in rows] == [prefill.NOISE, "zipvl", "rows_999"]
    assert rows[0]["agreement"] == rows[0]["within"] == 1
    assert 0 < rows[1]["kept"] < 1
    tokens = torch.tensor(text.tokens)
    whole = prefill.Prefill(model, prefill.Form("rows", tau=1.1), Cache(model, TOKENS), TOKENS, 0)
    found = model.hidden(tokens[None], torch.arange(TOKENS), whole.attend)[0]
    torch.testing.assert_close(found, read(model, tokens, Cache(model, TOKENS)), rtol=1e-4, atol=1e-4)
    assert whole.kept == whole.pairs == [1.0] * LAYERS


def test_routing_skips_the_share_that_held_out_texts_set(model, text, monkeypatch):
    monkeypatch.setattr(routing, "DENSE_LAYERS", 0)
    rows = list(routing.measure_routing(model, None, [text], [text], list(routing.ROUTINGS), [0.25]))
    assert rows[0]["arm"] == routing.DENSE
    assert rows[0]["agreement"] == 1
    for row in rows[1:]:
        # A static rule skips whole groups, and the same text sets and meets the threshold elsewhere.
        assert row["skipped"] == pytest.approx(0.25, abs=0.13 if row["arm"].startswith("static") else 0.05), row


def test_a_group_that_only_sees_the_first_token_is_filled_by_its_value(model):
    cache = Cache(model, 8)
    cache.keys.zero_()
    cache.values.normal_(generator=torch.Generator().manual_seed(0))
    cache.length = 4
    query = torch.ones(1, model.num_heads, 1, model.head_size)
    cache.keys[0, :, 0] = 10
    run = routing.RoutedDecode(model, cache, routing.Routing("mass", "sink"), None)
    output = run.attend(0, query, torch.zeros(1, KV_HEADS, 1, model.head_size), torch.zeros(1, KV_HEADS, 1, 32))
    attended, fill = run._late
    torch.testing.assert_close(attended, fill)
    torch.testing.assert_close(output[0].unflatten(0, (KV_HEADS, GROUP)), fill)
    torch.testing.assert_close(run.scores[0], torch.ones(KV_HEADS, 1))


def test_pages_hold_at_most_what_the_oracle_reads(model, text, question):
    monotone = list(pages.measure_pages(model, [text, question], PAGE_ARMS, ["max", "share"]))
    mass = {(row["text"], row["arm"], row["reduce"], row["pages"]): row["mass"] for row in monotone if "mass" in row}
    for (name, arm, _, budget), value in mass.items():
        assert value <= mass[name, pages.ORACLE, "", budget] + 1e-4, arm
        assert 0 < value <= 1.0001
    # All complete pages, and the incomplete one.
    assert mass["prose/0", "mean8", "max", 64] == pytest.approx(1.0, abs=1e-4)


def test_a_decode_that_reads_every_page_is_dense(model, text):
    rows = list(decode.measure_decode(model, None, [text], [pages.ORACLE, "mean8"], ["max"], [2, 64], [0, 9]))
    agreement = {(row["arm"], row["pages"], row["first_dense"]): row["agreement"] for row in rows if row["arm"]}
    assert len(agreement) == 8
    assert {value for (_, budget, first), value in agreement.items() if budget == 64 or first == 9} == {1.0}
    assert agreement["mean8", 2, 0] < 1


def test_a_decode_reads_chosen_pages_and_what_no_page_holds_yet():
    layer = pages.Layer.of(torch.randn(4, 3, 16), torch.randn(2, 45, 16), 0.25)
    read = decode.tokens_of(decode.chosen_pages(layer, pages.ORACLE, "max", 3), layer, 45)
    assert read.shape == (2, 3, 45)
    for row, position in enumerate((42, 43, 44)):
        assert read[:, row, :8].all()
        assert read[:, row, 32 : position + 1].all()
        assert not read[:, row, position + 1 :].any()
        assert (read[:, row, 8:32].sum(dim=-1) == 8).all()


def test_a_layer_that_reads_its_own_choice_is_a_decode(model, text):
    rows = list(reuse.measure_reuse(model, None, [text], [text], ["mean8"], [2, 64]))
    agreement = {(row["pages"], row["plan"]): row["agreement"] for row in rows if row["arm"]}
    alone = list(decode.measure_decode(model, None, [text], ["mean8"], ["max"], [2], [0]))
    assert agreement[2, "each"] == alone[0]["agreement"]
    assert {value for (budget, _), value in agreement.items() if budget == 64} == {1.0}
    assert {row["plan"]: row["anchors"] for row in rows if row["arm"]}["every2"] == -(-model.num_layers // 2)


def test_heads_read_the_pages_that_hold_most_of_their_weight():
    caught = torch.zeros(2, 2, 2, 2)
    caught[0, 0], caught[1, 1] = torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([[0.7, 0.1], [0.2, 0.9]])
    caught[1, 0] = torch.tensor([[0.3, 0.6], [0.5, 0.1]])
    plan = next(plan for plan in reuse.plans_of(caught) if plan.name == "every2_heads")
    assert plan.anchors == [0, 0]
    assert plan.heads[1, 0].tolist() == [1, 0]


def test_first_and_newest_page_and_the_rest_are_always_read():
    query, keys = torch.randn(4, 3, 16), torch.randn(2, 45, 16)
    layer = pages.Layer.of(query, keys, 0.25)
    weights = causal_weights(query, keys, 0.25, torch.arange(42, 45)).mean(dim=1).transpose(0, 1)
    read_by_two = layer.read(torch.zeros(3, 2, 5), 2)
    torch.testing.assert_close(read_by_two, weights[..., :8].sum(dim=-1) + weights[..., 32:].sum(dim=-1))


def test_all_keys_estimate_the_weight_of_a_page():
    keys = torch.randn(2, 6, pages.PAGE, 64, generator=torch.Generator().manual_seed(0))
    query = torch.randn(5, 2, 3, 64, generator=torch.Generator().manual_seed(1)) / 8
    truth = torch.einsum("rhgd,hptd->rhgpt", query, keys).logsumexp(dim=-1)
    error = {
        name: (kind.make(keys)(query) - truth).std().item() for name, kind in pages.KINDS_OF_PAGES.items()
    }  # fmt: skip
    assert error["keys2"] < error["mean8"]
    assert all(value < 2 for value in error.values()), error


def test_codes_of_the_arms_stay_those_that_were_measured():
    keys = (torch.arange(2 * 3 * pages.PAGE * 64).view(2, 3, pages.PAGE, 64) * 37 % 101 - 50).float()
    squares = keys.unflatten(-2, (4, 2)).mean(dim=-2)[..., :2, 2:].square().mean(dim=(-2, -1))
    for codes, spacing in ((pages.QUARTERS, 0.3352), (pages.WIDE, 0.5), (pages.WIDER, 0.7)):
        vectors = pages.in_codes(codes, keys.unflatten(-2, (4, 2)).mean(dim=-2))
        step = vectors[..., 0, 2:].abs().amin(dim=-1) * 2
        torch.testing.assert_close(step, squares.sqrt() * spacing, rtol=0.01, atol=0)
    assert KINDS["quarters"].codes == pages.WIDER
    assert Codes(bits=2, vectors=8, spacing=0.9957, dropped=2) == pages.ALL_KEYS


@pytest.mark.parametrize(("num_sinks", "newest"), [(0, 7), (4, 7), (4, 64)])
def test_a_window_is_a_mask(num_sinks, newest):
    query, key, value = torch.randn(1, 4, 40, 16), torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)
    rows, columns = torch.arange(40)[:, None], torch.arange(40)
    mask = (columns <= rows) & ((columns > rows - newest) | (columns < num_sinks))
    expected = masked_attention(query, key, value, 0.25, mask)
    torch.testing.assert_close(window_attention(query, key, value, 0.25, num_sinks, newest), expected)


def test_an_observer_describes_the_first_token_of_dense_attention(model, text, monkeypatch):
    monkeypatch.setattr(sinks, "LEVELS", (0.5,))
    monkeypatch.setattr(sinks, "NEAR", 0.5)
    tokens, observer = torch.tensor(text.tokens), sinks.SinkObserver(model)
    found = model.hidden(tokens[None], torch.arange(TOKENS), observer.attend, observer.project)[0]
    cache = Cache(model, TOKENS)
    torch.testing.assert_close(found, read(model, tokens, cache), rtol=1e-4, atol=1e-4)
    assert [row["layer"] for row in observer.layers] == list(range(LAYERS))
    for layer, row in enumerate(observer.layers):
        assert row["first_value_norm"] == pytest.approx(cache.values[layer, :, 0].norm(dim=-1).mean().item(), rel=1e-4)
        assert row["key_norm"] == pytest.approx(cache.keys[layer, :, 1:].norm(dim=-1).mean().item(), rel=1e-4)
    assert "layer_cosine" in observer.layers[1]
    assert "layer_cosine" not in observer.layers[0]
    (level,) = observer.levels()
    assert level["queries"] == LAYERS * KV_HEADS * GROUP * sinks.NEWEST
    assert level["mass"] == pytest.approx(sum(row["mass"] for row in observer.layers) / LAYERS, rel=1e-3)


def test_orders_by_weight_and_by_contribution_are_compared():
    weights = torch.tensor([0.5, 0.3, 0.2, 0.0]).view(1, 1, 1, 4)
    values = torch.tensor([[1.0, 0.0], [0.0, 1.0], [4.0, 0.0], [9.0, 9.0]])[None]
    written = weights * values.norm(dim=-1)[:, None, None]
    found = contributions.compare(weights, written, values, 2)
    # By weight: tokens 0 and 1. By contribution .5, .3, .8, 0: tokens 2 and 0. All: (1.3, .3).
    whole = torch.tensor([1.3, 0.3])
    by_weight, by_contribution = torch.tensor([0.5 / 0.8, 0.3 / 0.8]), torch.tensor([1.3 / 0.7, 0.0])
    assert found["missed"] == 0.5
    assert found["missed_output"] == pytest.approx(0.8 / 1.6)
    assert found["weight_error"] == pytest.approx(((by_weight - whole).norm() / whole.norm()).item(), abs=1e-4)
    assert found["contribution_error"] == pytest.approx(
        ((by_contribution - whole).norm() / whole.norm()).item(), abs=1e-4
    )


def test_contributions_are_those_of_every_layer(model, text):
    rows = list(contributions.measure_contributions(model, [text]))
    assert [(row["layer"], row["tokens"]) for row in rows] == [
        (layer, count) for layer in range(LAYERS) for count in contributions.COUNTS if count < TOKENS
    ]
    for fewer, more in zip(rows[::2], rows[1::2], strict=True):
        assert 0 <= fewer["missed"] < 1
        assert fewer["weight_error"] >= more["weight_error"] >= 0
        assert fewer["contribution_error"] >= more["contribution_error"] >= 0
    assert rows[0]["weight_error"] > 0


def test_losses_are_those_of_tokens_beyond_the_window(model, text, monkeypatch):
    monkeypatch.setattr(sinks, "WINDOW_TOKENS", 40)
    nats = {row["arm"]: row["nats"] for row in sinks.measure_sinks(model, [text], sinks.ARMS, 3) if "nats" in row}
    assert set(nats) == set(sinks.ARMS)
    assert len(set(nats.values())) == 4
    tokens = torch.tensor(text.tokens)
    logits = model.logits(read(model, tokens, Cache(model, TOKENS)))
    expected = torch.nn.functional.cross_entropy(logits[40:-1], tokens[41:]).item()
    assert nats[sinks.DENSE] == pytest.approx(expected, abs=1e-3)
    monkeypatch.setattr(sinks, "WINDOW_TOKENS", TOKENS)
    assert not any("nats" in row for row in sinks.measure_sinks(model, [text], sinks.ARMS, 3))


def test_spans_of_answers():
    text, offsets = "ab 12 cd", [(0, 2), (2, 3), (3, 4), (4, 5), (5, 8)]
    assert find_spans(text, offsets, ("12",)) == ((2, 4),)
    assert find_spans(text, offsets, ("1", "cd")) == ((2, 3), (4, 5))
    assert find_spans(text, offsets, ("12", "zz")) == ()
    assert find_spans("12 12", [(0, 2), (2, 5)], ("12",)) == ()


def test_prompts_are_read_as_written(tmp_path, question, text):
    path = tmp_path / "prompts.gz"
    write_prompts(path, [question, text])
    assert read_prompts(path) == [question, text]
    path.write_text("x")
    with pytest.raises(ConfigurationError, match="allowed: a file of `prepare`"):
        read_prompts(path)


def test_names_choose_arms():
    assert choose_arms("pool13,zipvl") == {
        "answers": ["pool13"],
        "prefill": ["zipvl"],
        "routing": [],
        "pages": [],
        "decode": [],
        "reuse": [],
        "sinks": [],
        "selection": [],
        "adaptive": [],
        "contributions": [],
    }
    assert choose_arms("")["answers"] == list(RULES)
    with pytest.raises(ConfigurationError, match="arms: got 'nope'"):
        choose_arms("nope")


def test_scores_are_held_to_dense_attention():
    share = estimate_ratio([0.5, 0.0, 1.0, 0.5] * 10, [1.0, 0.5, 1.0, 0.5] * 10)
    assert share.value == pytest.approx(2 / 3)
    assert share.low < share.value < share.high
    nothing = estimate_ratio([0.0], [0.0])
    assert all(value != value for value in (nothing.value, nothing.low, nothing.high))


@pytest.mark.parametrize("study", ["prefill", "decode", "adaptive"])
def test_tables_leave_out_a_text_that_alone_lacks_its_noise(study):
    about = {"study": study, "kind": "prose", "context_tokens": 300, "choice": "fixed"}
    kept = {"kept": 0.4, "attention_flops": 0.5, "kept_by_layer": [0.4]}
    rows = [about | {"arm": "some", "text": text, "agreement": 0.6} | kept for text in "ab"]
    noise = about | {"arm": "noise", "text": "a", "agreement": 0.8}

    def shown(rows: list[dict]) -> list[str]:
        """What the arm has beside the noise."""
        table = next(tables(rows))
        columns = {column.header: list(column.cells) for column in table.columns}
        cells = columns["excess" if study == "decode" else "of noise"]
        return [cell for arm, cell in zip(columns["arm"], cells, strict=True) if arm == "some"]

    assert set(shown([noise, *rows])) == {"0.200" if study == "decode" else "0.750"}
    # Without any noise the texts were read in float32.
    assert set(shown(rows)) == {"0.400" if study == "decode" else "0.600"}


def test_tables_of_all_studies(model, question, text, monkeypatch):
    monkeypatch.setattr(routing, "DENSE_LAYERS", 0)
    rows = [
        *measure_answers(model, [question], list(RULES), [0.25], str, [], [1], ROOM),
        *prefill.measure_prefill(model, model, [text], ["zipvl"]),
        *routing.measure_routing(model, model, [text], [text], ["cosine"], [0.1]),
        *pages.measure_pages(model, [text], ["mean8"], ["max"]),
        *decode.measure_decode(model, model, [text], ["mean8"], ["max"], [2], [0]),
        *reuse.measure_reuse(model, model, [text], [text], ["mean8"], [2]),
        *sinks.measure_sinks(model, [text], sinks.ARMS, 0),
        *contributions.measure_contributions(model, [text]),
    ]  # fmt: skip
    rows = json.loads(json.dumps(rows))
    assert {row["arm"] for row in rows if "survive" in row} == set(RULES)
    assert [table.title.split()[0] for table in tables(rows)] == [
        "RULER", "Prefill", "Skipped", "Weight", "Decode", "Decode", "First", "Weights", "Loss", "Best",
    ]  # fmt: skip
