"""Several replicas: which of them serves a request, and when the request is sent to it.

:mod:`~chairlift.distributed.door` holds the waiting requests, :mod:`~chairlift.distributed.routing` chooses a replica.
Neither uses processes or networks, and their caller gives the time, so that the simulator runs the same code.
:mod:`~chairlift.distributed.fleet` puts both in front of engine processes.
"""
