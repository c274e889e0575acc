"""Snapshots as directories: paths and errno on one side, a snapshot view on the other.

mounts        make, list and end mounts: what the command line and programs call
driver        the interface of a way to mount
mount_table   the kernel's list of mounts

fuse_driver   mounts that a process serves, from outside of it
daemon        that process
connection    a mount's requests, from the kernel to `operations`, and threads for them
protocol      these requests and their answers as bytes
operations    paths, handles and errno -> tree and view
tree          names, attributes and inodes of one snapshot
store_tree    the same of what refs show: of a whole store, and of a ref that is followed
folders       of the models of a store, as programs look for them
about         what is told of a snapshot beside its files
readahead     when to read ahead

erofs         mounts that no process serves: the kernel reads the packs

"""

from __future__ import annotations
