"""The rows of `test_lmdb_copy`, for its writers: processes that import nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

from mstore.blocks.lmdb_env import Environment

ROWS = 60


def value(state: int, row: int) -> bytes:
    """What a row is in a state; some are long enough for pages of their own."""
    return state.to_bytes(8, "big") * (700 if row % 5 == 0 else 3 + state % 40)


def put(env: Environment, state: int) -> None:
    """One commit in which every row says the same."""
    with env.write() as transaction:
        for row in range(ROWS):
            transaction.put(b"%d" % row, value(state, row), db=env.databases["rows"])


def write_on(path: str, first: int) -> None:
    """A writer's process: state after state, and each one told when it is committed."""
    env = Environment.acquire(Path(path), ("rows",))
    state = first
    while True:
        put(env, state)
        print(state, flush=True)
        state += 1


def main() -> None:
    """PATH STATE...: commits of another process."""
    env = Environment.acquire(Path(sys.argv[1]), ("rows",))
    for state in sys.argv[2:]:
        put(env, int(state))


if __name__ == "__main__":
    main()
