"""A rank, one training process: ``python -m holdfast.rank``.

A rank reads its configuration from HOLDFAST_CONFIG, takes orders as JSON lines on its standard input and reports events
as JSON lines on its standard output. Everything that the recipe prints goes to standard error. With several ranks only
the main rank gets orders; it passes them on to the other ranks.

`holdfast.rank.messages` lists the orders and the events. A rank executes orders one after the other, except for
``Save`` and ``Stop``, which take effect after the current step.

A rank also stops if its parent dies (its standard input ends) and on SIGTERM; see `orders`. The rank then finishes its
step, writes a durable checkpoint and ends. A rank never commits; the next attempt adopts the rank's checkpoint.

The parent uses `launching`, `process` and `ending`, which import no torch.
"""
