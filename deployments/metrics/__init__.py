"""The server's metrics, and the ways in which they are exported."""
