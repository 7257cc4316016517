"""Forward and backward passes of attention under a page mask, compared with dense attention."""
