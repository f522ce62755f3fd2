"""What happens to a model before its first request: load, check, measure, compile."""
