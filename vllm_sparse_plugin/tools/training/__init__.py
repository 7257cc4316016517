"""Fine-tunes a model on the pages that serving selects, as an attention mask.

It needs the extra `train`. It does not need vLLM.
"""
