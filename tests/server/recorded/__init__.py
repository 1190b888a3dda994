"""Request bodies of whole coding tasks, in the shapes that agents send. The texts are our own."""
