"""Creates directories with quantised weights from 16-bit models, for ``chairlift quantize``. Serving does not import
this package."""
