"""One training process: ``python -m holdfast.rank``.

It reads its configuration from HOLDFAST_CONFIG, takes orders as JSON lines on its standard input and reports events as
JSON lines on its standard output; whatever the recipe prints goes to its standard error. With several ranks only the
main one gets orders; it passes them on.

`holdfast.rank.messages` lists the orders and the events. Orders are obeyed one after the other, but for ``Save`` and
``Stop``, which may come at any time.

A rank whose parent has died (its standard input ends), or that gets SIGTERM, stops as if ordered to: it finishes the
current step, writes a durable checkpoint and ends. It never commits: the next attempt adopts its checkpoint.

The parent's half is in `launching`, `process` and `ending`, which import no torch.
"""
