"""Several models behind one server: which are loaded, and their engines."""
