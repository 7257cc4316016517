"""One model in many deployments of vLLM. Sparse attention must answer as in a plain engine."""
