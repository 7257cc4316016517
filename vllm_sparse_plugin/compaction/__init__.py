"""The KV cache gives blocks back once a prompt has been computed."""
