"""Generated blocks of the pages: README.md, docs/ and the pages of research/ and bench/."""
