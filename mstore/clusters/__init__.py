"""Clusters: a merge's slices are computed where workers are, and its packs go where models are.

    engine      who hands out slices: the contract, and executors of this machine
    dask, ray, slurm   engines that teams already run
    pilots      processes that take calls from a directory, for Slurm
    address     what people write for one
    probe       what each worker says of itself before any work
    at_remote   workplaces at a remote: packs are read there, and put there
    merging     a merge on a cluster, from the probe to the result

A slice names packs and ranges, and its receipt names blocks: no weight passes through the process
that calls.
"""
