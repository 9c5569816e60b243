"""Order, loop and gates; the command line."""
