"""The kept tokens depend only on lengths."""

from dataclasses import replace

import pytest

from vllm_sparse_plugin.evictions import Pyramid, Retention

BLOCK = 16


def sliding(budget: int = 100, sinks: int = 4, least: int = 0) -> Retention:
    return Retention(True, budget, None, sinks, least)


def moving(budget: int | None = 100, ratio: float | None = None, least: int = 0, share: float = 1.0) -> Retention:
    return Retention(False, budget, ratio, 4, least, share=share)


def test_a_window_keeps_the_sinks_and_the_newest_tokens_in_whole_blocks():
    retention = sliding()
    for context in range(1, 1000):
        left_out = retention.left_out(50, context, BLOCK)
        kept = {token for token in range(context) if token // BLOCK not in left_out}
        assert kept >= {*range(min(4, context)), *range(max(0, context - 96), context)}
        assert len(kept) < 4 + 96 + 2 * BLOCK
        # A request that omits blocks continues to omit them.
        assert set(left_out) <= set(retention.left_out(50, context + 1, BLOCK))


def test_kept_tokens_of_a_prompt_fit_the_last_full_blocks():
    retention = moving()
    for prompt in range(1, 1000):
        left_out = retention.left_out(prompt, prompt + 1, BLOCK)
        if prompt // BLOCK <= 7:
            assert len(left_out) == 0
            assert not retention.moves(prompt, BLOCK)
            continue
        # 100 tokens are 7 blocks of 16.
        assert left_out == range(prompt // BLOCK - 7)
        assert retention.moves(prompt, BLOCK)
        assert retention.shared_tokens(prompt, BLOCK) == 16 * len(left_out)
        assert left_out == retention.left_out(prompt, prompt + 5000, BLOCK)
        assert retention.held_blocks(prompt, prompt + 1, BLOCK) == 7 + 1


def test_a_ratio_follows_the_prompt_and_a_share_the_layers():
    assert [moving(None, 0.25).budget(prompt) for prompt in (1, 400, 401)] == [5, 100, 101]
    assert moving(None, 1.0).left_out(777, 800, BLOCK) == range(0)
    assert moving(100, share=0.5).budget(1000) == 4 + 48
    # In floating point these products are a little more than whole numbers: 880 and 112.
    assert moving(None, 0.55).budget(1600) == 880
    assert moving(None, 0.07).kept_blocks(1600, BLOCK) == 7


@pytest.mark.parametrize(("layers", "classes", "sizes"), [(32, 4, 8), (8, 4, 2), (6, 4, 2), (7, 4, 7), (1, 4, 1)])
def test_a_pyramid_falls_to_the_average_over_beta_and_keeps_the_sum(layers, classes, sizes):
    shares = Pyramid(20.0, classes).shares(layers)
    assert sum(shares) == pytest.approx(layers)
    assert shares == sorted(shares, reverse=True)
    assert [shares.count(share) for share in sorted(set(shares), reverse=True)] == [sizes] * (layers // sizes)
    if layers > 1:
        exact = Pyramid(20.0, 64).shares(layers)
        assert (exact[0], exact[-1]) == (pytest.approx(1.95), pytest.approx(0.05))
        retentions = replace(moving(204), reserved_tokens=100, pyramid=Pyramid(20.0, 64)).of_layers(layers)
        assert [retentions[0].budget(1000), retentions[-1].budget(1000)] == [104 + 195, 104 + 5]


def test_equal_budgets_are_a_pyramid_of_beta_one():
    assert Pyramid(1.0, 4).shares(8) == [1.0] * 8


def test_short_prompts_keep_everything():
    assert moving(least=512).left_out(511, 600, BLOCK) == range(0)
    assert moving(least=512).left_out(512, 600, BLOCK) == range(25)
    assert moving(least=512).longest_hit(511, BLOCK) == 510
    assert sliding(least=512).left_out(100, 511, BLOCK) == range(1, 1)
    assert sliding(least=512).left_out(100, 512, BLOCK) == range(1, 26)


def test_where_every_query_counts_a_prompt_of_which_tokens_move_takes_no_hit():
    retention = replace(moving(least=300), counts_every_query=True)
    for prompt in range(1, 1000):
        plain = moving(least=300).longest_hit(prompt, BLOCK)
        assert retention.longest_hit(prompt, BLOCK) == (0 if retention.moves(prompt, BLOCK) else plain)


@pytest.mark.parametrize("retention", [moving(), moving(None, 0.3), moving(least=300)])
def test_a_hit_ends_before_the_blocks_that_are_written_again(retention):
    for prompt in range(1, 1000):
        hit = retention.longest_hit(prompt, BLOCK) // BLOCK
        assert hit * BLOCK < prompt
        if retention.moves(prompt, BLOCK):
            assert hit <= prompt // BLOCK - retention.kept_blocks(prompt, BLOCK)


def repeating(every: int, least: int = 0, budget: int = 100) -> Retention:
    return replace(moving(budget, least=least), every=every)


@pytest.mark.parametrize("every", [16, 40, 128, 1000])
@pytest.mark.parametrize("least", [0, 300])
def test_evictions_follow_at_equal_distances_for_the_whole_life_of_a_request(every, least):
    """100 tokens are 7 blocks of 16. The cache never holds more than they, two distances, and incomplete blocks."""
    retention = repeating(every, least)
    for prompt in (1, 90, 112, 113, 290, 500, 511):
        begin = max(prompt, 7 * BLOCK, least)
        for context in range(prompt + 1, 1500):
            left_out = retention.left_out(prompt, context, BLOCK)
            evictions = range(begin, context, every)
            assert left_out == range(evictions[-1] // BLOCK - 7 if evictions else 0)
            assert left_out.stop <= retention.left_out(prompt, context + 1, BLOCK).stop
            if context > begin + every:
                assert retention.held_blocks(prompt, context, BLOCK) <= 7 + -(-every // BLOCK) + 1


@pytest.mark.parametrize(("every", "least"), [(16, 0), (40, 0), (128, 0), (40, 300)])
def test_capacity_counts_what_a_request_holds_in_its_whole_life(every, least):
    retention = repeating(every, least)
    for prompt in (1, 90, 112, 113, 290, 299, 300, 500, 511):
        held = [retention.held_blocks(prompt, context, BLOCK) for context in range(prompt + 1, 3000)]
        assert max(held) <= retention.most_held_blocks(prompt, BLOCK) <= max(held) + 1


def test_a_prompt_within_the_budget_is_evicted_from_at_the_budget_and_the_distance():
    retention = repeating(128)
    assert retention.left_out(50, 112 + 128, BLOCK) == range(0)
    assert retention.left_out(50, 112 + 128 + 1, BLOCK) == range(8)
    assert retention.left_out(300, 300, BLOCK) == range(0)
    assert retention.left_out(300, 301, BLOCK) == moving().left_out(300, 301, BLOCK)


@pytest.mark.parametrize("every", [16, 40, 128])
def test_no_eviction_writes_blocks_that_requests_share(every):
    retention = repeating(every, least=50)
    for prompt in range(1, 500, 7):
        written = {
            left_out.stop
            for context in range(prompt + 1, 1200)
            if (left_out := retention.left_out(prompt, context, BLOCK))
        }
        assert retention.moves(prompt, BLOCK)
        assert min(written) * BLOCK == retention.shared_tokens(prompt, BLOCK) >= BLOCK
        assert retention.longest_hit(prompt, BLOCK) == min(prompt - 1, min(written) * BLOCK)
