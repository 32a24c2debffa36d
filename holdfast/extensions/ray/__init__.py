"""An attempt's ranks on a Ray cluster, where a process on the attempt's machine takes torchrun's place.

The attempt starts `python -m holdfast.extensions.ray` as it starts torchrun: with its orders as standard input, the
ranks' events as standard output and the attempt's log as standard error. The process makes a placement group with one
bundle for each node. An actor in each bundle, a `Carrier`, starts that node's ranks with
`holdfast.rank.launching.Ranks`, as the command on each node does without Ray. The ranks connect through torchrun's
rendezvous on the first of these nodes. So the ranks' code doesn't use Ray, and the code for Ray doesn't handle steps
and checkpoints.

If the attempt dies, this process sees the end of its input and closes the ranks' input. If this process dies, too, Ray
ends the actors, which also closes the ranks' input. In both cases the ranks save and end; see `holdfast.rank`.

Importing this package doesn't import Ray, which only the extra ``ray`` installs.
"""

from holdfast.extending import Extension

extension = Extension("ray", launchers={"ray": "holdfast.extensions.ray.launcher:launcher"})
