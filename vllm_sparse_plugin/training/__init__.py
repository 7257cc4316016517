"""Fine-tunes a model with the pages that it will be served with, as a soft mask and then exactly.

It needs the extra `train`, and not vLLM.
"""
