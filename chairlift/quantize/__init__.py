"""Makes quantised directories from 16-bit models, for ``chairlift quantize``. Serving imports none of it."""
