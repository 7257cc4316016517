"""Quality: needle questions in the engine, and how well the statistics find the pages that matter."""
