"""Speed: decode time per token, and a server under load."""
