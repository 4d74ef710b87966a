"""`python -m kvledger.audit.checks` prints docs/invariants.md."""

from .registry import markdown

if __name__ == "__main__":
    print(markdown(), end="")
