"""Many models behind one server: their engines, and the routes that choose one."""
