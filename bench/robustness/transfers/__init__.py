"""A server that prefills and one that decodes. Clients that leave between the two must cost nobody a block."""
