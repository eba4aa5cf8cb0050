"""Many ranks: the engines of PyTorch's that share a step among processes, what ranks tell one another, and ranks that
are not there.

`engines` puts DistributedDataParallel or `fully_shard` on a workload, `group` is what a step asks of the others, and
`mesh` makes their meshes, of live ranks or of the fake ones that a step is captured with."""
