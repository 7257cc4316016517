"""Operations of sparse decode attention: page statistics, page scores, page top-k, attention over pages.

Each operation is a folder: `api` validates and dispatches, `reference` is the specification in torch. Nothing
here knows vLLM, so the operations can be tested, timed and reused without it.
"""
