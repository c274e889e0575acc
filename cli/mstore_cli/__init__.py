"""The `mstore` command line: parses arguments and prints one report.  The library does the work.

This package owns option names, printed text, exit statuses and the rules for finding a store.  It
contains no format, no storage policy and no state of its own.
"""
