"""`python -m kvledger` is the same as `kvledger`."""

from .cli import main

if __name__ == "__main__":
    main()
