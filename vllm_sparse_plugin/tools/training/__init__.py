"""Fine-tunes a model with the pages that it will be served with, as a mask over what it attends to.

It needs the extra `train`, and not vLLM.
"""
