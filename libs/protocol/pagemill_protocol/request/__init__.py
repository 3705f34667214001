"""A request as a gateway hands it to an engine: token ids, sampling parameters, constraints."""
