"""One model in many deployments of vLLM: the answers of sparse attention must stay what they are in a plain engine."""
