"""More than one replica: which of them serves a request, and when it is sent there.

:mod:`~chairlift.distributed.door` keeps the requests that wait, :mod:`~chairlift.distributed.routing` chooses. Both
know nothing of processes and networks, and take the time from their caller, so that the simulator runs the same code.
"""
