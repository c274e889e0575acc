"""Snapshots as directories: paths and errno on one side, a snapshot view on the other.

    mount_table   the kernel's list of mounts
    tree          names, attributes and inodes of one snapshot
    store_tree    the same of a whole store, and of a ref that is followed
    about         what is told of a snapshot beside its files
    options       how a mount is made
    readahead     when to read ahead
    operations    FUSE requests -> tree and view
    libfuse       the only module that uses mfusepy
    daemon        the process behind one mount
    mounts        start, list and end mounts: what the command line and programs call

Only the daemon loads libfuse and mfusepy.
"""

from __future__ import annotations
