"""One model on several processes of a machine: tensor parallelism for the native CPU kernels."""
