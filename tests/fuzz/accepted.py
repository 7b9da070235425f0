ACCEPTED: dict[str, str] = {}
