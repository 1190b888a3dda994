"""One order for the steps of several engines that share the processors of a machine."""
