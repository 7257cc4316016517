"""Cases, plans, counted bytes and inputs of the kernel benchmark."""

import pytest
import torch

from bench.common.options import parse_sizes, size_text
from bench.kernels import traffic
from bench.kernels.cases import OPS, DecodeCase, Geometry, Grid, PrefillCase, TopKCase
from bench.kernels.cli import cache_blocks
from bench.kernels.workload import needles
from vllm_sparse_plugin.errors import ConfigurationError


def test_sizes_are_read_and_written_as_people_do():
    assert parse_sizes("batch", ["1, 8,32K", "8"]) == (1, 8, 32768)
    assert [size_text(size) for size in (1, 2048, 524288, 1000)] == ["1", "2K", "512K", "1000"]


@pytest.mark.parametrize("text", ["", "1,,2", "-1", "0", "K", "1M", "1.5"])
def test_other_sizes_are_refused(text):
    with pytest.raises(ConfigurationError, match=r"^batch: got .*, allowed: positive integers"):
        parse_sizes("batch", [text])


def test_one_request_of_eight_completes_a_page():
    lengths = DecodeCase(32, 2048, 4).lengths(Geometry())
    assert max(lengths) == 2048 == lengths[0]
    assert sum(length % 8 == 0 for length in lengths) == 4


def test_names_follow_the_grammar_of_vllm():
    assert DecodeCase(8, 32768, 4).name == "8q1s32K g4"
    assert DecodeCase(8, 32768, 4, tokens=9).name == "8q9s32K g4"
    assert DecodeCase(8, 32768, 4, "fp8").name == "8q1s32K g4 fp8"
    assert DecodeCase(8, 32768, 4, "leveled").name == "8q1s32K g4 leveled"
    assert PrefillCase(131072, 8192, 4).name == "1q8Ks128K g4"


def test_the_plan_starts_with_the_first_group_and_ends_with_other_formats():
    plan = Grid().plan()
    assert len(plan) == len(set(plan))
    assert {op for op, _ in plan} == set(OPS)
    assert plan[0] == ("decode", DecodeCase(1, 2048, 4))
    decodes = [case for _, case in plan if isinstance(case, DecodeCase)]
    assert sum(op == "topk" for op, _ in plan) == 15
    prefills = [case for op, case in plan if op == "prefill"]
    assert prefills == [PrefillCase(c, q, 4) for c in (131072, 32768) for q in (8192, 2048)]
    assert [case.format for case in decodes] == sorted(
        (c.format for c in decodes), key=["int4", "int8", "int2", "fp8", "bf16"].index
    )
    assert {op for op, case in plan if getattr(case, "format", "int4") == "int8"} == {"decode", "score"}
    assert {op for op, case in plan if getattr(case, "format", "int4") not in ("int4", "int8")} == {"score"}
    first_other_group = next(index for index, (_, case) in enumerate(plan) if getattr(case, "group", 4) != 4)
    assert {op for op, _ in plan[:first_other_group]} == set(OPS)


def test_the_cache_is_as_large_as_the_largest_case_that_fits():
    geometry, plan = Geometry(), Grid().plan()
    # In bf16 the record of a page has 130 bytes more: a block has five rows of statistics instead of four.
    block_bytes = 8 * 69 * 256 * 2
    assert cache_blocks(plan, geometry, 10**12) == 32 * 524288 // 64
    assert cache_blocks(plan, geometry, 65536 * block_bytes) == 32 * 131072 // 64
    assert cache_blocks([("topk", TopKCase(8, 1024))], geometry, 10**12) == 1


def test_bytes_of_one_request():
    case, geometry = DecodeCase(1, 2048, 4, "int8"), Geometry()
    query = 8 * 4 * 128 * 2
    record = 8 * (128 + 4)
    token = 8 * 2 * 128 * 2
    assert traffic.dense(case, geometry) == 2048 * token + 2 * query
    assert traffic.score(case, geometry) == 256 * (record + 8 * 2) + query
    assert traffic.attend(case, geometry) == 64 * 8 * token + 2 * query + 8 * 64 * 4
    assert traffic.copy(case, geometry) == 2 * token
    assert traffic.write(case, geometry) == 2 * token + 8 * token // 2 + record
    assert traffic.decode(case, geometry) == (traffic.write(case, geometry) + 256 * record + 64 * 8 * token + 2 * query)
    assert traffic.topk(TopKCase(64, 4096), geometry) == 64 * (4096 * 2 + 64 * 4)
    # Five groups of eight are skipped.
    assert traffic.routed(case, geometry) == 2048 * token * 3 // 8 + 2 * query
    assert traffic.routed_sparse(case, geometry) == (256 * record + 64 * 8 * token) * 3 // 8 + 2 * query


def test_bytes_follow_the_format_and_the_incomplete_page():
    geometry = Geometry()
    assert traffic.score(DecodeCase(1, 2048, 4, "bf16"), geometry) - traffic.score(
        DecodeCase(1, 2048, 4, "fp8"), geometry
    ) == 256 * 8 * (258 - 132)
    # The second request is one token shorter: 255 complete pages and 7 tokens.
    both, first = (traffic.selected_tokens(DecodeCase(batch, 2048, 1), geometry) for batch in (2, 1))
    assert both - first == (64 * 8 + 7) * 8 * 2 * 128 * 2 + 2 * 8 * 128 * 2


def test_bytes_of_a_step_of_a_prompt():
    case, geometry = PrefillCase(1024, 128, 4), Geometry()
    chunk = 128 * 32 * 128 * 2
    tokens = 1024 * 8 * 2 * 128 * 2
    # A page has four vectors with half a byte per element.
    records = 128 * 8 * 4 * 64
    # Two tiles, with 14 and 15 blocks before them.
    scores = (14 + 15) * 8 * 4
    assert traffic.dense_prefill(case, geometry) == tokens + 2 * chunk
    assert traffic.sparse_prefill(case, geometry) == tokens + 2 * chunk + records
    assert traffic.prefill_summaries(case, geometry) == records + 128 * 8 * 4 * 128 * 2
    assert traffic.prefill_scores(case, geometry) == records + chunk + scores
    assert traffic.prefill_choice(case, geometry) == scores
    assert traffic.prefill_regrouping(case, geometry) == 4 * chunk


def test_rewriting_the_new_tokens_leaves_the_cache_as_it_is(decode_inputs):
    before = decode_inputs.token_rows.clone()
    block, offset = decode_inputs.slots // 64, decode_inputs.slots % 64
    both = torch.cat([decode_inputs.new_keys, decode_inputs.new_values], dim=-1)
    decode_inputs.token_rows[block, :, offset] = both
    assert torch.equal(decode_inputs.token_rows, before)
    assert not decode_inputs.query.is_contiguous()


def test_requests_have_blocks_of_their_own_scattered_over_the_cache(decode_inputs):
    blocks = decode_inputs.block_table.flatten()
    assert decode_inputs.block_table.dtype == torch.int32
    assert len(blocks.unique()) == len(blocks) == 4 * 12
    assert not torch.equal(blocks, blocks.sort().values)


def test_random_pages_are_distinct_complete_and_ascending(decode_inputs):
    pages = decode_inputs.pages
    assert pages.shape == (4, 2, 8)
    assert bool((pages.diff(dim=-1) > 0).all())
    assert bool((pages < decode_inputs.num_pages[:, None, None]).all())


def test_short_contexts_have_fewer_pages_than_the_selection_holds(workload):
    pages = workload.decode_inputs(DecodeCase(1, 40, 1)).pages
    assert pages[0, 0].tolist() == [0, 1, 2, 3, 4, -1, -1, -1]


@pytest.mark.parametrize("statistics", ["int4", "int2", "int8", "fp8", "bf16"])
def test_needles_are_selected_and_gone_afterwards(workload, statistics):
    inputs = workload.decode_inputs(DecodeCase(3, 768, 2, statistics))
    before = [workload._cache.view(torch.int16).clone(), inputs.token_rows.clone()]

    def gap():
        scores = statistics_scores(inputs)[2].float().sort(dim=-1, descending=True).values
        # Six needles, and the first and the newest page, which are always read.
        return float((scores[:, 5] - scores[:, 6]).min())

    random_gap = gap()
    with needles(inputs, [0, 2]):
        assert gap() > 10 > random_gap
    assert torch.equal(workload._cache.view(torch.int16), before[0])


def statistics_scores(inputs):
    from sparse_kernels.page_score import reference

    table = inputs.block_table.long()
    return reference.score_pages(inputs.grouped_query, inputs.statistics, table, inputs.num_pages, 0.75)


def test_two_levels_are_charged_for_what_they_read():
    geometry = Geometry()
    record = 8 * 256
    sixteen, flat = 131072 // 8, 2048

    def scored(pages: int) -> int:
        case = DecodeCase(1, 8 * pages, 4, "leveled")
        return traffic.score(case, geometry) - pages * 8 * 2 - 4 * 8 * 128 * 2

    assert scored(flat) == flat * record
    assert scored(flat + 8) == ((flat + 8) * record + 3 * 1024 * record) // 4
    assert scored(sixteen) == (sixteen * record + 3 * sixteen // 4 * record) // 4
    assert traffic.decode(DecodeCase(1, 131072, 4), geometry) - traffic.decode(
        DecodeCase(1, 131072, 4, "leveled"), geometry
    ) == sixteen * record - scored(sixteen)
