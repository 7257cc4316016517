"""ZipVL's rule says which tokens of a prompt a layer keeps (arXiv 2410.08584, Sec. 4 and supplement A)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenRule:
    """Keep the tokens that carry the share `tau` of the attention of some probe rows."""

    tau: float = 0.975
    """Share of the accumulated attention that the kept tokens carry at least (Eq. 7); 1 keeps every token."""
    recent_probes: int = 64
    """Newest tokens of a chunk whose attention is computed."""
    random_probes: int = 64
    """Tokens of the chunk drawn from those before them whose attention is computed, too."""
    seed: int = 0
    """Seed of the draw, 32 bits of which count."""
    dense_tokens: int = 0
    """Contexts of up to this many tokens are attended whole: T is every token of them."""

    @property
    def num_probes(self) -> int:
        """Probe rows of a chunk, at most."""
        return self.recent_probes + self.random_probes

    def check(self) -> None:
        """Raises ValueError unless the rule keeps something and every token is seen by a probe row."""
        if not 0 < self.tau <= 1:
            raise ValueError(f"tau: got {self.tau}, allowed: above 0, at most 1")
        for name, got, least in (
            ("recent_probes", self.recent_probes, 1),
            ("random_probes", self.random_probes, 0),
            ("dense_tokens", self.dense_tokens, 0),
        ):
            if got < least:
                raise ValueError(f"{name}: got {got}, allowed: at least {least}")
