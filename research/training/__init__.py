"""What training with the mask buys: a small model's answers and text before and after."""
