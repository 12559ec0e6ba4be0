"""`python -m runtime` is `scanwright`."""

from runtime.cli import entry

if __name__ == "__main__":
    entry()
