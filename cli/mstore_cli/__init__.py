"""The `mstore` command line: words in, one report out.  All the work is done by the library.

This package owns option names, printed words, exit statuses and where a store is looked for.
It holds no format, no policy of storage and no state of its own.
"""
