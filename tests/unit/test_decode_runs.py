import pytest

from vllm_sparse_plugin.attention.base import decode_runs

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
