"""Convert pickled weights to safetensors, in a child process with limits.

    conversion   which files are pickles, how each is handled, and the child process
    program      the child: loads with `weights_only=True` and writes safetensors; the only place
                 that knows torch.  A separate program, run by path: nothing imports it

A pickle is a program. `weights_only` lets it only build tensors. A pickle that escapes that finds a
process without privileges to gain, with little memory, time and disk, and without mstore's memory.
It still runs as the same user: convert only files that you would load yourself (docs/security.md).
"""
