"""`python -m indpriv`: the command line, also where scripts are not on the path."""

from indpriv.cli import main

if __name__ == "__main__":
    main()
