"""`python -m bench.kernels`."""

from bench.kernels.cli import app

if __name__ == "__main__":
    app()
