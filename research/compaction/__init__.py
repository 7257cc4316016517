"""What answers survive when a cache keeps a part of a prompt, and whether a window needs its first tokens."""
