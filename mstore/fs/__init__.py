"""Files: the only room that changes anything on a disk.

roots    a store's directory, opened once; what lies in it is reached from there
rights   owners and modes of what is created, and who may write it
files    creation, writing, syncing, renaming, removing; the seam of the crash tests
locks    files that one process holds at a time
trees    a directory that appears at once, outside of any store
disks    kinds of filesystems, free space
"""

from mstore.fs.disks import (
    LOCAL_FILESYSTEMS,
    MOUNTINFO,
    block_bytes,
    filesystem_type,
    free_bytes,
)
from mstore.fs.files import (
    NewFile,
    Observer,
    Operation,
    about_to_map,
    create_whole,
    exchange,
    in_memory,
    index_commit,
    link,
    make_directories,
    make_directory,
    observed,
    overwrite,
    remove_empty,
    remove_tree,
    rename,
    replace_text,
    require_empty,
    sync_directory,
    unlink,
    unnamed,
)
from mstore.fs.locks import LockFile
from mstore.fs.rights import may_write, require_writable, share, share_tree
from mstore.fs.roots import (
    Root,
    directory,
    is_there,
    listed,
    listed_below,
    open_file,
    read_file,
    reading,
    refusal,
    require_kinds,
    status_of,
    translated,
    unexpected,
    unread,
)
from mstore.fs.trees import NewTree

__all__ = [
    "LOCAL_FILESYSTEMS",
    "MOUNTINFO",
    "LockFile",
    "NewFile",
    "NewTree",
    "Observer",
    "Operation",
    "Root",
    "about_to_map",
    "block_bytes",
    "create_whole",
    "directory",
    "exchange",
    "filesystem_type",
    "free_bytes",
    "in_memory",
    "index_commit",
    "is_there",
    "link",
    "listed",
    "listed_below",
    "make_directories",
    "make_directory",
    "may_write",
    "observed",
    "open_file",
    "overwrite",
    "read_file",
    "reading",
    "refusal",
    "remove_empty",
    "remove_tree",
    "rename",
    "replace_text",
    "require_empty",
    "require_kinds",
    "require_writable",
    "share",
    "share_tree",
    "status_of",
    "sync_directory",
    "translated",
    "unexpected",
    "unlink",
    "unnamed",
    "unread",
]
