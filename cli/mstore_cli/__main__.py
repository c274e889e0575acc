"""`python -m mstore_cli` is the program `mstore`."""

from mstore_cli.main import main

main()
