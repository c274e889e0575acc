"""The page size of the files that LMDB makes on this machine: the system's, or LMDB's largest."""

import mmap

PAGE = min(mmap.PAGESIZE, 1 << 15)
