"""Quality: needle questions in the engine."""
