"""What training with the mask gains: arms of one recipe, and the quality of each result at every budget."""
