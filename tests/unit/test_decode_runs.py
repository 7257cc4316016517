import pytest

from vllm_sparse_plugin.attention.cuda.runs import DecodeRun, decode_runs

CASES = {
    "one token each": ([1, 1, 1], 1, [(0, 3, 0, 3)]),
    "prefill behind": ([1, 1, 512, 7], 1, [(0, 2, 0, 2)]),
    "prefill alone": ([512], 4, []),
    "nothing": ([], 4, []),
    "different numbers of drafts": ([4, 4, 2, 1, 1], 4, [(0, 2, 0, 8), (2, 1, 8, 2), (3, 2, 10, 2)]),
    "drafts, then a prompt, then more": ([3, 1, 900, 1], 4, [(0, 1, 0, 3), (1, 1, 3, 1)]),
    "longer than speculation reaches": ([5, 1], 4, []),
    "padding": ([2, 2, 0], 4, [(0, 2, 0, 4)]),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_runs(case):
    query_lens, longest, expected = case
    assert decode_runs(query_lens, longest) == expected


@pytest.mark.parametrize(
    ("run", "most_tokens", "expected"),
    [
        ((2, 3, 5, 6), 6, [(2, 3, 5, 6)]),
        ((2, 3, 5, 6), 5, [(2, 2, 5, 4), (4, 1, 9, 2)]),
        ((2, 3, 5, 6), 1, [(2, 1, 5, 2), (3, 1, 7, 2), (4, 1, 9, 2)]),
        ((0, 3, 0, 0), 1, [(0, 3, 0, 0)]),
    ],
    ids=["at the limit", "above it", "a request above it", "padding alone"],
)
def test_parts_of_a_run_are_whole_requests(run, most_tokens, expected):
    assert list(DecodeRun(*run).parts(most_tokens)) == expected
