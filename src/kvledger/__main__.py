"""`python -m kvledger` is the same as `kvledger`."""

from kvledger.cli import main

if __name__ == "__main__":
    main()
