"""The generation APIs as they are on the wire: requests, answers, errors, streams."""
