"""What clients meet: the routes of the gateway, who may use them, what surrounds each request."""
