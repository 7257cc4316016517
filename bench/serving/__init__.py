"""Speed: time to first token, decode time per token, and a server under load."""
