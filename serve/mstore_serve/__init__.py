"""A store over HTTP: read-only, with ranges and ETags.  See `mstore_serve.serving`.

serving      what programs and the command line call; needs no extra package to import
server       the process: socket, connections, signals (uvicorn)
logs         its log
app          one request: limits, address, conditions, ranges, errors, access log
bodies       the bytes of one answer, piece by piece
shown        what an address shows: files, tensors, documents
documents    the JSON documents
pages        what an address shows a browser
reports      reports and comparisons: computed when they are asked for, and remembered
addresses    the grammar of addresses
ranges       Range: which bytes
conditions   If-Match, If-None-Match and others
"""
