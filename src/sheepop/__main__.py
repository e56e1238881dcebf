"""``python -m sheepop`` is the ``sheepop`` command."""

from sheepop.cli.main import main

if __name__ == "__main__":
    main()
