"""What strangers can hand to mstore: one module for each kind of input.

A module has `target`, a function of bytes that may raise MstoreError and nothing else; FORM, how
its bytes are mutated (`mutation.Form`); and `seeds`, sound inputs to begin with.  Where an input
carries its own hash the target mends it, or nothing behind that check would ever be reached.
"""
