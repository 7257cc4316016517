"""Coverage asked against coverage got: how well page statistics estimate a page's share of the attention weight."""
