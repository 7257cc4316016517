"""The study of page scores: needle-8m answers questions that it decodes sparsely from their first token on."""
