"""Fits machines to the logs and benchmark records of other engines, and tests the fits on runs that were held back.

:mod:`.vllm_log`, :mod:`.sglang_log` and :mod:`.records` read files as :mod:`.run`. :mod:`.reconstruct` recovers the
steps behind the token times of requests. :mod:`.step_fit` fits a cost model to steps, after :mod:`.identify` has said
which terms the steps can determine, and :mod:`.polish` adjusts it to the latencies of requests. :mod:`.validate`
simulates the runs that were held back.
"""
