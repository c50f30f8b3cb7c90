"""`python -m ucformat.cli`."""

from ucformat.cli.app import main

main()
