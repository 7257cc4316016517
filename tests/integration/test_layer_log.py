"""The log of what the requests of one attention layer read."""

from support.bare_layer import LayerBatch
from support.layer import SMALL, LayerHarness

from vllm_sparse_plugin.metrics import request_log


def test_a_log_has_what_each_request_reads(model, monkeypatch):
    common = LayerBatch.common
    # As vLLM's model runners do.
    monkeypatch.setattr(LayerBatch, "common", lambda self: common(self).replace(seq_lens_cpu_upper_bound=self.seq_lens))
    harness = LayerHarness(model, settings=SMALL | {"diagnostics": {"log_requests": True}}, seed=4)
    requests = [harness.request(n) for n in (200, 333)]
    harness.step([(request, request.prompt_tokens) for request in requests])
    for _ in range(2):
        harness.step([(request, 1) for request in requests])
    log = request_log.of_runner(harness)
    first, second = (log._requests[request.name] for request in requests)
    budget = harness.selection.budget_tokens
    assert (first.tokens_read, first.tokens_in_context) == (2 * budget + 201 % 8 + 202 % 8, 201 + 202)
    assert (second.tokens_read, second.tokens_in_context) == (2 * budget + 334 % 8 + 335 % 8, 334 + 335)
