"""``python -m flipgrad`` is ``flipgrad``."""

from flipgrad.cli import main

if __name__ == "__main__":
    main()
