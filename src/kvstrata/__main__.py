"""`python -m kvstrata`."""

from kvstrata.cli.main import app

if __name__ == "__main__":
    app(prog_name="kvstrata")
