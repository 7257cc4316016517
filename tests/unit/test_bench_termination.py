import torch
from transformers import AutoTokenizer

from research.termination.__main__ import PAPER, agreement, depth, rules
from research.termination.model import MODEL, Layer, Question, questions
from research.termination.report import PAGE, render


def layer(blocks: int) -> Layer:
    """One token of one KV head with three query heads of 64 elements; the probe are the even ones."""
    partial = torch.ones(1, 1, blocks, 3, 64)
    # The second head's odd elements change until block 7, the third head's all the time.
    partial[0, 0, :6, 1, 1::2] += torch.arange(6.0)[:, None]
    partial[0, 0, :, 2] += torch.arange(float(blocks))[:, None]
    return Layer(partial, torch.tensor([blocks]), torch.tensor([[4]]))


def test_agreement_is_counted_by_query_head():
    # Patience 5: stable from block 2 on is a stop at block 6, from block 8 on one at block 12.
    assert agreement(layer(20), PAPER) == {
        "decisions": 3, "early": 1, "late": 0, "stopped": 2, "apart": 1, "offset_sum": 6, "offset_squares": 36
    }  # fmt: skip


def test_the_last_block_is_no_stop():
    found = agreement(layer(11), PAPER)
    assert (found["early"], found["apart"]) == (1, 0)
    assert agreement(layer(6), PAPER)["stopped"] == 0


def test_depth_is_a_share_of_the_blocks_and_its_error():
    found = depth(layer(20))
    assert (found["rows"], round(found["share_sum"], 6)) == (1, 0.2)
    assert [found[f"to {10 * n}%"] for n in range(1, 11)] == [0, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    # The third head: ones plus 3 beside ones plus 19. The second: odd elements of 4 beside ones.
    expected = (0 + 3 * 32**0.5 / 64**0.5 + 16 / 20) / 3
    assert abs(found["error_sum"] - expected) < 1e-5


def test_every_part_of_the_rule_is_left_out_once():
    names = {name.partition(",")[0] for name in rules(ablated=True)}
    assert names == {"never", "whole", "no scale test", "no direction test", "no patience"}
    assert {name.partition(",")[0] for name in rules(ablated=False)} == {"never", "whole"}


def test_short_contexts_hold_the_needle():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    found: list[Question] = questions(tokenizer, "kv", 1024, 3)
    for question in found:
        assert 600 < len(question.prompt) <= 1024
        assert tokenizer.decode(question.answer).strip() in tokenizer.decode(question.prompt)


def test_the_page_is_what_the_results_say():
    assert render() == PAGE.read_text(encoding="utf-8")
