import math

import pytest
import torch
from sparse_kernels.batch import Softmax
from sparse_kernels.page_topk import best_first, select_pages
from sparse_kernels.stopping import StopRule, pages_until_stable, probe_elements, reference
from support.paged import PagedBatch, make_batch

CONTEXTS = [1500, 517, 1, 7, 8, 64, 512, 1024]
RULE = StopRule(scale_tolerance=0.1, direction_tolerance=1e-2, patience=2, block_tokens=64)


def newest_first(batch: PagedBatch, num_kv_heads: int) -> torch.Tensor:
    page = torch.arange(int(batch.num_pages.max()))
    count = batch.num_pages[:, None, None]
    return torch.where(page < count, count - 1 - page, -1).expand(-1, num_kv_heads, -1).contiguous()


def queries(batch: PagedBatch, num_kv_heads: int, group: int, size: int) -> torch.Tensor:
    """Some queries match one of the newest keys, others no key."""
    sharpness = torch.linspace(0, 160 / size, len(batch.keys) * num_kv_heads).flip(0).view(-1, num_kv_heads, 1, 1)
    own = torch.stack([key[-1] for key in batch.keys]).unsqueeze(2).float()
    return (sharpness * own + 0.3 * torch.randn(len(batch.keys), num_kv_heads, group, size)).bfloat16()


def count(batch, query, pages, rule, sinks=None, softcap=0.0, scale=0.125):
    return pages_until_stable(batch.tokens(query), batch.cache, pages, Softmax(scale, softcap, sinks), rule)


def by_hand(batch, query, pages, rule, request, head, sinks, softcap, scale=0.125) -> int:
    """Algorithm 1 of the paper in Python's floats, one token after the other. Pages only give the order."""
    group, size = query.shape[2:]
    context, page_size = int(batch.context_lens[request]), batch.page_size
    order = [page for page in pages[request, head].tolist() if page >= 0]
    keys, values = batch.keys[request][:, head].double(), batch.values[request][:, head].double()
    logits = query[request, head].double() @ keys.T * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    weights = logits.exp()
    per_block = rule.block_tokens // page_size
    probe, seen = probe_elements(size), list(range(context // page_size * page_size, context))
    before, consecutive = None, 0
    for first in range(0, len(order), per_block):
        for page in order[first : first + per_block]:
            seen += range(page * page_size, (page + 1) * page_size)
        x = weights[:, seen] @ values[seen][:, probe]
        total = weights[:, seen].sum(dim=1)
        if sinks is not None:
            total = total + sinks.view(-1, group)[head].double().exp()
        x = (x / total[:, None]).tolist()
        stable = before is not None
        for now, old in zip(x, before or [], strict=False):
            norms = math.hypot(*now) * math.hypot(*old)
            direction = 1 - sum(a * b for a, b in zip(now, old, strict=True)) / norms
            stable &= math.dist(now, old) < rule.scale_tolerance and direction < rule.direction_tolerance
        before, consecutive = x, consecutive + 1 if stable else 0
        pages_read = min(first + per_block, len(order))
        if consecutive >= rule.patience and pages_read >= rule.least_pages:
            return pages_read
    return len(order)


@pytest.mark.parametrize(("heads", "group", "size", "page_size"), [(2, 4, 64, 8), (2, 3, 96, 32), (1, 1, 16, 16)])
@pytest.mark.parametrize("extras", [{}, {"sinks": True}, {"softcap": 120.0}], ids=["plain", "sinks", "softcap"])
def test_stops_where_the_paper_does(heads, group, size, page_size, extras):
    batch = make_batch(CONTEXTS, heads, size, page_size=page_size)
    query, pages = queries(batch, heads, group, size), newest_first(batch, heads)
    sinks = torch.randn(heads * group) + 2 if extras.get("sinks") else None
    softcap = extras.get("softcap", 0.0)
    found = count(batch, query, pages, RULE, sinks, softcap)
    expected = [
        [by_hand(batch, query, pages, RULE, request, head, sinks, softcap) for head in range(heads)]
        for request in range(len(CONTEXTS))
    ]
    assert found.tolist() == expected
    assert (found < batch.num_pages[:, None]).any(), "nothing stopped"
    assert (found == batch.num_pages[:, None]).any(), "nothing went on to the end"


def test_the_error_of_a_stop_is_within_the_papers_bounds():
    """Theorems 1 and 2. Each uses the smallest constants with which its assumptions hold."""
    batch = make_batch(CONTEXTS, 2, 64)
    query, pages = queries(batch, 2, 4, 64), newest_first(batch, 2)
    found = count(batch, query, pages, RULE)
    softmax, probe = Softmax(0.125), probe_elements(64)
    outputs = reference.partial_outputs(batch.tokens(query), batch.cache, pages, softmax, RULE.block_tokens)
    tightest, per_block = math.inf, RULE.block_tokens // batch.page_size
    for request, head in (found < batch.num_pages[:, None]).nonzero().tolist():
        stop, last = int(found[request, head]) // per_block, -(-int(batch.num_pages[request]) // per_block)
        keys, values = batch.keys[request][:, head].double(), batch.values[request][:, head].double()
        for o, one in zip(outputs[request, head, :last].unbind(1), query[request, head].double(), strict=True):
            weights = (keys @ one * 0.125).exp()
            complete = len(weights) // batch.page_size * batch.page_size
            mass = torch.stack([part.sum() for part in weights[:complete].flip(0).split(RULE.block_tokens)])
            total = weights[complete:].sum() + mass.cumsum(0)
            first = stop - RULE.patience + 1
            steps = torch.arange(first, last + 1, dtype=torch.float64)
            share = (mass / total)[first - 1 :]
            mu = float((steps * share).max())
            moved = o[first - 1 :] - torch.cat([o[first - 2 : first - 1], o[first - 1 : -1]])
            seen = moved[:, probe].norm(dim=-1)
            nu = float((seen / moved.norm(dim=-1)).min())
            ahead = seen / share
            by_probe = (RULE.scale_tolerance / share[0] + (ahead - ahead[0]).max()) * mu / nu
            by_values = 2 * mu * values.norm(dim=-1).max()
            bound = float(min(by_probe, by_values)) * math.log(last / stop)
            assert float((o[-1] - o[stop - 1]).norm()) <= bound * (1 + 1e-4)
            tightest = min(tightest, bound / float(2 * values.norm(dim=-1).max()))
    assert tightest < 0.1, "every bound allows nearly any error"


CHANGES = {
    "scale": {"scale_tolerance": 0.01},
    "direction": {"direction_tolerance": 1e-6},
    "patience": {"patience": 4},
    "blocks": {"block_tokens": 128},
    "least": {"least_pages": 100},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_part_of_the_rule_counts(change):
    batch = make_batch([1500, 1400, 1300], 2, 64)
    query, pages = queries(batch, 2, 4, 64), newest_first(batch, 2)
    before = count(batch, query, pages, RULE)
    rule = RULE._replace(**change)
    after = count(batch, query, pages, rule)
    expected = [[by_hand(batch, query, pages, rule, r, head, None, 0.0) for head in range(2)] for r in range(3)]
    assert after.tolist() == expected
    assert (after > before).any()


def test_never_stops_without_patience_or_for_outputs_of_no_direction():
    batch = make_batch(CONTEXTS, 2, 64)
    query, pages = queries(batch, 2, 4, 64), newest_first(batch, 2)
    everything = batch.num_pages[:, None].expand(-1, 2)
    assert torch.equal(count(batch, query, pages, RULE._replace(patience=0)), everything)
    batch.paged_values.view.zero_()
    assert torch.equal(count(batch, query, pages, RULE), everything)


def test_the_rows_of_a_batch_do_not_meet():
    batch = make_batch(CONTEXTS, 2, 64)
    query, pages = queries(batch, 2, 4, 64), newest_first(batch, 2)
    together = count(batch, query, pages, RULE)
    for request in range(len(CONTEXTS)):
        row = slice(request, request + 1)
        alone = pages_until_stable(batch.tokens(query)[row], batch.cache, pages[row], Softmax(0.125), RULE)
        assert torch.equal(alone[0], together[request])


def test_best_first_is_the_order_of_the_scores():
    scores = torch.tensor([[3.0, 1.0, 5.0, 5.0, float("nan"), -0.0, 0.0, 9.0, 2.0]]).bfloat16()[None]
    lengths = torch.tensor([8])
    for k, expected in ((6, [0, 7, 2, 3, 1, 5]), (8, [0, 7, 2, 3, 1, 5, 6, 4])):
        pages = select_pages(scores, lengths, k, 1, 1)
        assert best_first(pages, scores, lengths, 1, 1)[0, 0].tolist() == expected
    pages = torch.tensor([[[0, 2, 3, -1]]])
    assert best_first(pages, scores, lengths)[0, 0].tolist() == [2, 3, 0, -1]


def test_blocks_of_broken_pages_are_refused():
    batch = make_batch([64], 1, 64, page_size=32)
    with pytest.raises(ValueError, match="block_tokens: got 48, allowed: a multiple of the page size 32"):
        count(
            batch,
            torch.zeros(1, 1, 1, 64),
            torch.zeros(1, 1, 1).long(),
            RULE._replace(block_tokens=48),
        )
