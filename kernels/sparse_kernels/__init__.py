"""Operations of sparse decode attention: page statistics, page scores, page top-k, attention over pages.

Each operation is a folder: `api` validates and dispatches, `reference` is the specification in torch. No module
imports vLLM, so the operations are tested, timed and reused without it.
"""
