"""Forward and backward passes of attention under a page mask, beside dense attention."""
