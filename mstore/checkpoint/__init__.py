"""Reading checkpoints as users have them: safetensors headers, directories, pickles.

    dtypes       the dtypes that safetensors knows, and how many bytes a shape takes
    header       one safetensors file: length, JSON, tensors in data order
    tree         the files of a directory, the rules for links, the Hugging Face cache
    directory    a checkpoint: those files, every header, the shard indexes
    declared     the base models that a checkpoint names
    paths        which relative paths may become files
    strict_json  untrusted JSON objects, for header and directory
    conversion   pickled weights as safetensors, in a child process with limits
    reading      opens regular files, and turns system errors into the library's

`conversion_program` is that child, the only place that knows torch: a program of its own, run by
path.  A pickle is a program, too; `weights_only` lets it only build tensors, and one that escapes
finds a process without privileges to gain, with little memory, time and disk.  It still runs as the
same user (docs/security.md).

All other modules only read.  All their input is untrusted: they parse with limits, execute nothing,
never open a pickle, and refuse what it does not understand with BadCheckpoint.
"""
