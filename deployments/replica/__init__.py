"""One replica of one model: from a request to the records of its answer."""
