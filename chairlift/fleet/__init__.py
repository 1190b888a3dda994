"""Serving with several replicas: chooses the replica of each request, and decides when the request is sent to it.

:mod:`~chairlift.fleet.door` has the queue of waiting requests, and :mod:`~chairlift.fleet.routing` chooses
a replica. Both use no processes and no network, and get the time from their caller, so that the simulator can run the
same code. :mod:`~chairlift.fleet.fleet` uses both for real engine processes.
"""
