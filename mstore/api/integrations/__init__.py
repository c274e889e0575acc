"""Other libraries on top of mstore, each imported only when it is used."""
