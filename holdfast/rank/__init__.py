"""One training process: ``python -m holdfast.rank``.

It is given its configuration in HOLDFAST_CONFIG, takes orders as JSON lines on its standard input and reports events as
JSON lines on its standard output; whatever the recipe prints goes to its standard error. With several ranks only the
main one is spoken to; it passes the orders on.

=========================================  ===============================================================
order                                      event
=========================================  ===============================================================
(at the start)                             ``ready``: what was built, see `describe`
``restore``: commit, gate                  ``restored``: see `Resumed`; or ``damaged``, or ``tripped``; ``skipped`` now
                                           and then while a stream is read again
``begin``: commit, store, run              ``begun``: the weights are another run's; or ``damaged``
``train``: stop, fingerprint, into,        ``progress`` now and then, and ``saved`` when the checkpoint of the end
is_detailed                                is durable; the next order is obeyed meanwhile
``save``: may come at any time             ``saved`` once the step in hand is done, and training goes on
``evaluate``                               ``evaluated``: metrics, measured, anneals, probe
``examine``                                ``examined``: unregistered state, events, own_steps_per_epoch
``stop``: within_s; may come at any time   ``saved`` once the step in hand is done, and the rank ends; where there is
                                           time (``within_s``), in the last moment that is safe
``end``                                    the rank ends
=========================================  ===============================================================

A rank whose parent has died (the end of its standard input) or that gets SIGTERM does as if it were told to stop: it
finishes the step in hand, writes a durable checkpoint and ends. It never commits: the next attempt adopts what it left.
"""
