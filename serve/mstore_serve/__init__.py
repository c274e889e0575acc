"""A store over HTTP: read-only, with ranges and ETags.  See `mstore_serve.serving`.

serving      what programs and the command line call; needs no extra package to import
server       the process: socket, signals, logs (uvicorn)
connections  one connection: what is too slow, and how many there may be
app          one request: limits, address, conditions, ranges, errors, access log
bodies       the bytes of one answer, piece by piece
shown        what an address shows: files, tensors, documents, pages
documents    the JSON documents
pages        the HTML page of a directory
addresses    the grammar of addresses
ranges       Range: which bytes
conditions   If-Match, If-None-Match and others
"""
