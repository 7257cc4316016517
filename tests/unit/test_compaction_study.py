"""The study of compaction beside a model whose attention is masked token by token, and what its files say."""

import math

import pytest
import torch
from sparse_kernels.batch import Softmax
from support.llama import GROUP, HEAD_SIZE, KV_HEADS, save_llama
from support.snapkv import kept_tokens
from transformers import AttentionInterface, AutoModelForCausalLM

from bench.families.engines import Continuation
from bench.quality.identical import compare
from research.compaction.model import CompactingModel
from research.compaction.questions import Tally
from research.compaction.settings import BLOCK, SHARES, Reading, Setting, all_settings
from research.compaction.stream import StreamingModel, Window, rotate
from vllm_sparse_plugin.config.compaction import (
    H2OCompaction,
    SnapKVCompaction,
    StreamingLLMCompaction,
    ZipVLCompaction,
)

PROMPT, TAIL = 330, 20
TOLERANCE = 1e-2
"""Of log probabilities: keys and values are rounded to bfloat16, and may be the next one at a tie."""
SNAPKV = SnapKVCompaction(budget_tokens=96, window_tokens=8, min_context_tokens=0)
H2O = H2OCompaction(budget_tokens=96, min_context_tokens=0)
ZIPVL = ZipVLCompaction(budget_tokens=96, min_context_tokens=0, recent_probes=8, random_probes=8)
STREAMING = StreamingLLMCompaction(budget_tokens=96, sink_tokens=4, min_context_tokens=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("model"), longest=1024)


@pytest.fixture(scope="module")
def model(folder) -> CompactingModel:
    return CompactingModel(folder)


def tokens(count: int) -> list[int]:
    return torch.randint(97, (count,), generator=torch.Generator().manual_seed(3)).tolist()


class MaskedModel:
    """Reads a whole text at once; tokens behind the prompt see what a rule lets them."""

    def __init__(self, folder, compaction) -> None:
        AttentionInterface.register("masked", self.attend)
        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="masked", dtype=torch.float32)
        self.compaction = compaction

    def visible(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """`[num_kv_heads, num_tokens, num_tokens]` bool; `query` and `key` are `[num_tokens, heads, head_size]`."""
        seen = torch.ones(KV_HEADS, len(key), len(key), dtype=torch.bool).tril()
        retention, rule = self.compaction.retention(), self.compaction.rule()
        if retention.slides:
            for row in range(PROMPT, len(key)):
                left = retention.left_out(PROMPT, row + 1, BLOCK)
                seen[:, row, left.start * BLOCK : left.stop * BLOCK] = False
            return seen
        voting = query[0 if rule.every_query else PROMPT - rule.window_tokens : PROMPT]
        count = 96 + PROMPT % BLOCK
        for head, kept in enumerate(kept_tokens(voting, key[:PROMPT], count, Softmax(HEAD_SIZE**-0.5), rule, BLOCK)):
            seen[head, PROMPT:, [token for token in range(PROMPT) if token not in kept]] = False
        return seen

    def attend(self, module, query, key, value, attention_mask, **kwargs):
        key, value = key.bfloat16().float(), value.bfloat16().float()
        seen = self.visible(query[0].transpose(0, 1), key[0].transpose(0, 1))
        logits = query.unflatten(1, (KV_HEADS, GROUP)) @ key.unsqueeze(2).transpose(-1, -2) * HEAD_SIZE**-0.5
        weights = logits.masked_fill(~seen[:, None], -torch.inf).softmax(dim=-1)
        return (weights @ value.unsqueeze(2)).flatten(1, 2).transpose(1, 2), None

    @torch.inference_mode()
    def likely(self, text: list[int]) -> torch.Tensor:
        """`[num_tokens, vocabulary]`: log probabilities of what follows each token."""
        return self.model(torch.tensor([text]), use_cache=False).logits[0].log_softmax(dim=-1)


@pytest.mark.parametrize("compaction", [SNAPKV, H2O, ZIPVL, STREAMING], ids=lambda compaction: compaction.method)
def test_tokens_behind_a_prompt_read_what_is_kept_of_it(folder, model, compaction):
    text = tokens(PROMPT + TAIL)
    expected = MaskedModel(folder, compaction).likely(text)
    prompt = model.read(text[:300])
    # A question goes on where the document ends, and votes with it.
    prompt = model.read(text[300:PROMPT], after=prompt)
    assert (prompt.likely - expected[PROMPT - 1]).abs().max() < TOLERANCE
    says = model.decode_kept(prompt, text[PROMPT:], Reading(compaction))
    assert (says.likely - expected[PROMPT:]).abs().max() < TOLERANCE
    whole = model.decode_kept(prompt, text[PROMPT:], Reading())
    assert (whole.likely - expected[PROMPT:]).abs().max() > 10 * TOLERANCE


def test_accumulated_attention_of_a_prompt_is_the_sum_of_its_parts(model):
    text = tokens(PROMPT)
    whole, parts = model.read(text), model.read(text[200:], after=model.read(text[:200]))
    for one, other in zip(whole.layers, parts.layers, strict=True):
        assert (one.sums - other.sums).abs().max() < TOLERANCE
        assert one.sums.sum(dim=1).tolist() == pytest.approx([GROUP * PROMPT] * KV_HEADS, rel=1e-4)


def test_a_selection_reads_as_many_bytes_as_is_kept():
    for share in SHARES:
        for prompt_tokens in (4096, 16384):
            policy = Setting("unique", share).reading(prompt_tokens).policy
            records = prompt_tokens / (2 * policy.page_size)
            assert share * 0.98 <= (policy.budget_tokens + records) / prompt_tokens <= share
    assert Setting("unique", 1 / 32).reading(1000) is None
    assert Setting("pyramidkv", 1 / 32, 5).reading(4096) is None  # its window alone is more
    names = [(setting.name, setting.share) for setting in all_settings()]
    assert len(set(names)) == len(names)


def test_a_tally_counts_answers_by_document():
    tally = Tally()
    tally.add("kv-0", True, 0.5)
    tally.add("kv-0", False, 1.0)
    assert tally.row() == {"right": {"kv-0": "10"}, "answer_loss": 0.75}


@pytest.fixture(scope="module")
def streaming(folder) -> StreamingModel:
    return StreamingModel(folder)


def losses(model: StreamingModel, text: list[int], window: Window) -> torch.Tensor:
    return torch.cat(list(model.losses(text, window)))


@pytest.mark.parametrize("sinks", [0, 4])
def test_a_window_hides_what_lies_between_it_and_the_sinks(folder, streaming, sinks):
    text = tokens(700)

    class Windowed(MaskedModel):
        def visible(self, query, key):
            position = torch.arange(len(key))
            near = position > position[:, None] - (64 - sinks)
            return ((position < sinks) | near).tril().expand(KV_HEADS, -1, -1)

    likely = Windowed(folder, None).likely(text)
    expected = -likely[:-1].gather(1, torch.tensor(text[1:])[:, None])[:, 0]
    found = losses(streaming, text, Window("", sinks, 64))
    assert (found - expected).abs().max() < TOLERANCE


def test_rolling_positions_are_those_of_a_full_cache(folder, streaming):
    text = tokens(600)
    frequencies = streaming._model.model.rotary_emb.inv_freq
    x = torch.randn(3, HEAD_SIZE)
    turned = rotate(rotate(x, torch.tensor([5.0, 6, 7]), frequencies), torch.tensor([1.0, 2, 3]), frequencies)
    assert torch.allclose(turned, rotate(x, torch.tensor([6.0, 8, 10]), frequencies), atol=1e-5)
    # As long as the cache is not full, positions are true.
    true, rolling = (Window("", 4, 1000, rolls=rolls) for rolls in (False, True))
    assert (losses(streaming, text, true) - losses(streaming, text, rolling)).abs().max() < TOLERANCE
    # Behind that, the sinks come nearer.
    true, rolling = (Window("", 4, 64, rolls=rolls) for rolls in (False, True))
    assert (losses(streaming, text, true) - losses(streaming, text, rolling)).abs().max() > 10 * TOLERANCE


def test_answers_that_part_are_ties_or_not():
    dense = [Continuation([5, 6], [{5: -0.1}, {6: -0.7, 8: -0.72}])] * 3
    found = [Continuation(list(pair), [{}, {}]) for pair in ((5, 6), (5, 8), (5, 9))]
    row = compare("snapkv", dense, found)
    assert (row["prompts"], row["identical"], row["parted_at_ties"]) == (3, 1, 1)
    assert row["parted"] == [{"prompt": 1, "gap": 0.02}, {"prompt": 2, "gap": math.inf}]
