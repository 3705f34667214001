"""`python -m pagemill`, the same as the `pagemill` script."""

from pagemill.main import main

if __name__ == "__main__":
    main()
