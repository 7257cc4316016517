"""Arguments of requests for their attention: their check, and the rows of requests in a batch."""
