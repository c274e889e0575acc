"""Settings that every test shares: hypothesis profiles, and nothing else.

No deadline: a first call may compile a kernel.  `ci` draws the same examples each time, so that a
failure there is a failure here.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
