"""Reading checkpoints as users have them: safetensors headers, directories, partition into blocks.

    dtypes       the dtypes that safetensors knows, and how many bytes a shape takes
    header       one safetensors file: length, JSON, tensors in data order
    tree         the files of a directory, the rules for links, the Hugging Face cache
    hub          models in that cache, by their ids
    directory    a checkpoint: those files, every header, the shard indexes
    declared     the base models that a checkpoint names
    paths        which relative paths may become files
    partition    a tensor's bytes as blocks
    strict_json  untrusted JSON objects, for header and directory
    reading      opens regular files, and turns system errors into the library's

This package only reads. All its input is untrusted: it parses with limits, executes nothing, never
opens a pickle, and refuses what it does not understand with BadCheckpoint.
"""
