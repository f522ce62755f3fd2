"""The HTTP side of the gateway: routes, access, and middleware."""
