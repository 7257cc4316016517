"""A server with well-behaved and hostile clients. The hostile ones must not cost the others answers or blocks."""
