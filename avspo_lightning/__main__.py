"""``python -m avspo_lightning``."""

from avspo_lightning.cli import main

if __name__ == "__main__":
    main()
