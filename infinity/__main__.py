"""`python -m infinity` is the `infinity` command."""

from infinity.cli.main import main

if __name__ == "__main__":
    main()
