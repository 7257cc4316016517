"""A server with clients that connect and disconnect. Answers must not change, and no cache block may be lost."""
