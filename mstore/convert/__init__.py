"""Pickled weights as safetensors, made in a child process with limits.

    conversion   which files are pickles, what becomes of each, and the child's life
    program      the child: loads with `weights_only=True` and writes safetensors; the only place
                 that knows torch.  A program of its own, run by path: nothing imports it

A pickle is a program.  `weights_only` allows it nothing but to build tensors, and whatever gets
round that finds a process without privileges to gain, with little memory, time and disk, and with
none of mstore's memory in it.  It runs as the same user all the same: conversion is for
files that one would load, not for any file at all (docs/security.md).
"""
