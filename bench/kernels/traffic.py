"""Bytes that an operation must move, from shapes: each input read once, each output written once.

A rival is charged for the same bytes: intermediate results of several launches do not count.
"""

from __future__ import annotations

from sparse_kernels.page_score.levels import FLAT_PAGES, LEAST_OF_STRIPE, STRIPES

from bench.kernels.cases import DecodeCase, Geometry, PrefillCase, TopKCase

_BF16 = 2
_F32 = 4


def _token_bytes(geometry: Geometry) -> int:
    """Key and value of one token, all KV heads."""
    return geometry.num_kv_heads * 2 * geometry.head_size * _BF16


def _query_bytes(case: DecodeCase, geometry: Geometry) -> int:
    return case.batch * case.tokens * geometry.num_kv_heads * case.group * geometry.head_size * _BF16


def _record_bytes(case: DecodeCase | PrefillCase, geometry: Geometry) -> int:
    """Statistics of one page, all KV heads."""
    return geometry.num_kv_heads * geometry.layout(case.format).record_bytes


def _complete_pages(case: DecodeCase, geometry: Geometry) -> int:
    return sum(length // geometry.page_size for length in case.lengths(geometry))


def _scored_bytes(case: DecodeCase, geometry: Geometry) -> int:
    """Statistics that scoring reads: all, or of leveled ones the first vectors and the refined records."""
    pages, record = _complete_pages(case, geometry), _record_bytes(case, geometry)
    if not geometry.layout(case.format).kind.is_leveled:
        return pages * record
    counts = [length // geometry.page_size for length in case.lengths(geometry)]
    least = STRIPES * LEAST_OF_STRIPE
    refined = sum(count if count <= FLAT_PAGES else max(least, round(geometry.refined * count)) for count in counts)
    return (pages * record + 3 * refined * record) // 4


def score(case: DecodeCase, geometry: Geometry) -> int:
    """Statistics and query in, bfloat16 scores out."""
    scores = _complete_pages(case, geometry) * geometry.num_kv_heads * _BF16
    return _scored_bytes(case, geometry) + _query_bytes(case, geometry) + scores


def topk(case: TopKCase, geometry: Geometry) -> int:
    """Bfloat16 scores in, 32-bit page numbers out."""
    return case.rows * (case.pages * _BF16 + geometry.k * 4)


def attend(case: DecodeCase, geometry: Geometry) -> int:
    """Selected pages, the incomplete page, page numbers and query in, output out."""
    page = geometry.page_size
    tokens = sum(min(length // page, geometry.k) * page + length % page for length in case.lengths(geometry))
    numbers = case.batch * geometry.num_kv_heads * geometry.k * 4
    return tokens * _token_bytes(geometry) + numbers + 2 * _query_bytes(case, geometry)


def dense(case: DecodeCase, geometry: Geometry) -> int:
    """Every key and value and the query in, output out."""
    return sum(case.lengths(geometry)) * _token_bytes(geometry) + 2 * _query_bytes(case, geometry)


def selected_tokens(case: DecodeCase, geometry: Geometry) -> int:
    """Dense attention over the number of tokens that `attend` reads."""
    numbers = case.batch * geometry.num_kv_heads * geometry.k * 4
    return attend(case, geometry) - numbers


def write(case: DecodeCase, geometry: Geometry) -> int:
    """New keys and values in and out; for a completed page its keys in and its statistics out."""
    completed = sum(length % geometry.page_size == 0 for length in case.lengths(geometry))
    page_keys = geometry.page_size * _token_bytes(geometry) // 2
    return 2 * case.batch * _token_bytes(geometry) + completed * (page_keys + _record_bytes(case, geometry))


def copy(case: DecodeCase, geometry: Geometry) -> int:
    """New keys and values in and out."""
    return 2 * case.batch * _token_bytes(geometry)


def sparse(case: DecodeCase, geometry: Geometry) -> int:
    """Scoring, selecting and attending without writing scores or page numbers to memory."""
    return _scored_bytes(case, geometry) + selected_tokens(case, geometry)


def decode(case: DecodeCase, geometry: Geometry) -> int:
    """A whole step of sparse attention: the write of the new token, then `sparse`."""
    return write(case, geometry) + sparse(case, geometry)


def _active_share(case: DecodeCase, geometry: Geometry) -> float:
    return 1 - case.skipped_groups(geometry) / (case.batch * geometry.num_kv_heads)


def routed(case: DecodeCase, geometry: Geometry) -> int:
    """Dense attention of the groups that are not skipped, and all of the output."""
    tokens = sum(case.lengths(geometry)) * _token_bytes(geometry)
    return round(_active_share(case, geometry) * tokens) + 2 * _query_bytes(case, geometry)


def routed_sparse(case: DecodeCase, geometry: Geometry) -> int:
    """`sparse` for the groups that are not skipped."""
    ends = 2 * _query_bytes(case, geometry)
    return round(_active_share(case, geometry) * (sparse(case, geometry) - ends)) + ends


def _chunk_bytes(case: PrefillCase, geometry: Geometry) -> int:
    """Queries of a chunk, or its outputs."""
    return case.chunk * geometry.num_kv_heads * case.group * geometry.head_size * _BF16


def _prompt_records(case: PrefillCase, geometry: Geometry) -> int:
    return case.context // geometry.page_size * _record_bytes(case, geometry)


def dense_prefill(case: PrefillCase, geometry: Geometry) -> int:
    """Every key and value of the prompt and the queries in, output out."""
    return case.context * _token_bytes(geometry) + 2 * _chunk_bytes(case, geometry)


def sparse_prefill(case: PrefillCase, geometry: Geometry) -> int:
    """The same plus the statistics: some tile may read any block."""
    return dense_prefill(case, geometry) + _prompt_records(case, geometry)


def probe(case: PrefillCase, geometry: Geometry) -> int:
    """Keys in, a float32 sum per token out. The probe rows are negligible."""
    return case.context * (_token_bytes(geometry) // 2 + _F32)


def token_choice(case: PrefillCase, geometry: Geometry) -> int:
    """Sums in, 32-bit positions out."""
    return case.context * 2 * _F32
