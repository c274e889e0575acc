"""`python -m mstore_fuse`: see daemon.py."""

from __future__ import annotations

import sys

from mstore_fuse.daemon import main

sys.exit(main())
