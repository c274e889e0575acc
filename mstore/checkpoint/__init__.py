"""Reading checkpoints as users have them: safetensors headers, directories, partition into blocks.

    dtypes       the dtypes that safetensors knows, and how many bytes a shape takes
    header       one safetensors file: length, JSON, tensors in data order
    tree         the files of a directory, the rules for links, the Hugging Face cache
    directory    a checkpoint: those files, every header, the shard indexes
    declared     what a checkpoint says that it was made from
    paths        which relative paths may become files
    partition    a tensor's bytes as blocks
    strict_json  JSON objects from strangers, as header and directory read them
    reading      opening regular files, and the library's errors for what the system says

This package only reads.  Everything it is given is untrusted: it parses with limits, executes
nothing, never opens a pickle, and refuses what it does not understand with BadCheckpoint.
"""
