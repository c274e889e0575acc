"""The S3 face: snapshots as objects of a bucket, read-only, for programs that know only S3.

    face         what a request asks for, and which error it gets
    signatures   who signed it: AWS Signature Version 4
    listing      the keys of the bucket, in order
    documents    the XML

Bodies, ranges, conditions and limits are those of every face (`mstore_serve.app`).
"""
